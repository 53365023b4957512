"""Measurements that a user can repeat: own kernels beside the libraries', in one run. Part of the installed package."""
