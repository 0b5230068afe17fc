"""Who may call a server, and what keeps others out."""
