"""Layers with the parameters of n clients, for inputs with the clients folded into dimension 0."""
