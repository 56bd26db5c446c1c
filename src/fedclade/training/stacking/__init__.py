"""Layers whose parameters are those of n clients at once, for inputs with the clients folded into dimension 0."""
