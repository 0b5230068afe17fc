"""Sockets and protocol of the HTTP server: limits, TLS, and answers that outlive a head."""
