"""Trees of a fixed shape as a setting: by name, from a file, and what is no tree."""

from __future__ import annotations

import pytest

from speclocal.core.fixed_tree import EAGLE_1, MEDUSA
from speclocal.drafters import eagle, medusa
from speclocal.errors import UsageError


@pytest.mark.parametrize(("method", "name", "tree"), [(eagle, "eagle1", EAGLE_1), (medusa, "medusa", MEDUSA)])
def test_by_name_from_a_file_or_refused(tmp_path, method, name, tree):
    assert method.Settings().fixed() is None
    assert method.Settings(tree=name).fixed() is tree
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 2]]")
    assert method.Settings(tree=str(file)).fixed().paths == ((0,), (1,), (0, 2))
    for text in ("{", "[[0, 1]]", "[]", "[[-1]]"):
        file.write_text(text)
        with pytest.raises(UsageError):
            method.Settings(tree=str(file)).fixed()
    with pytest.raises(UsageError, match=f"nothing.*{name}"):
        method.Settings(tree="nothing").fixed()
