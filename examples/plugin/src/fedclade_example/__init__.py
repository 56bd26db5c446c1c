"""Objects that this package adds to fedclade, one file for each; pyproject.toml names them."""
