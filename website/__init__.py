"""The documentation site: pages of docs/ and references made from the code, for MkDocs."""
