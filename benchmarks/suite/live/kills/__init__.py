"""A campaign of kill -9 and SIGSTOP over all processes of a cluster, under streams."""
