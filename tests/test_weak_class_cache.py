from __future__ import annotations

import gc
import weakref

from raydist.core.weak_class_cache import remembered_by_class


def test_a_class_is_looked_at_once_and_forgotten_with_its_last_user() -> None:
    seen: list[str] = []

    @remembered_by_class
    def look(cls: type) -> int:
        seen.append(cls.__name__)
        return len(seen)

    for number in range(1, 4):
        cls = type(f"Made{number}", (), {})
        assert look(cls) == look(cls) == number
        gone = weakref.ref(cls)
        del cls
        gc.collect()
        assert gone() is None
    assert seen == ["Made1", "Made2", "Made3"]
