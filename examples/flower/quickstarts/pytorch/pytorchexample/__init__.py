"""Quickstart of Flower in the form of its published examples, on small data that is at hand."""
