"""The error that ends a whole cluster."""


class ClusterError(Exception):
    """The cluster cannot start or continue; one line says why and what to do."""
