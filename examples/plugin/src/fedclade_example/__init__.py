"""One of each that fedclade takes from other packages; pyproject.toml gives them their names."""
