"""Plants bugs: small patches of the product, each of which a check must find."""
