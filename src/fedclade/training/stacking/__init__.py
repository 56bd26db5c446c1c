"""Stacked modules: layers with the parameters of many clients, for one batched program.

The batches of k clients, with B examples each, are concatenated in dimension 0, ``[k·B, ...]``. A
stacked layer applies each client's own parameters to the client's rows.
"""
