"""The model catalogue: one TOML file a family. Data only."""
