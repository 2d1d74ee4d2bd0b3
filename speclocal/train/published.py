"""How trained heads are written: the layouts that other engines load."""
