"""The decoding core: trees, laws, acceptance rules and the loop. It knows no array library and does no I/O."""
