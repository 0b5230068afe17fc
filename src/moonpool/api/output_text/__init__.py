"""What models write besides plain text: tagged tool calls, and reasoning."""
