import pytest

from backends.host_memory import BoundedDict


def test_the_oldest_entries_are_forgotten():
    bounded = BoundedDict(2)
    for key in "abc":
        bounded[key] = key.upper()
    assert bounded == {"b": "B", "c": "C"}


def test_setting_again_keeps_the_place_of_an_entry():
    bounded = BoundedDict(2)
    bounded["a"], bounded["b"] = 1, 2
    bounded["a"] = 3
    assert bounded["b"] == 2
    assert list(bounded.items()) == [("a", 3), ("b", 2)]
    bounded["c"] = 4
    assert list(bounded.items()) == [("b", 2), ("c", 4)]


def test_setdefault_is_bounded_too():
    bounded = BoundedDict(1)
    assert bounded.setdefault("a", 1) == 1
    assert bounded.setdefault("a", 2) == 1
    assert bounded.setdefault("b", 3) == 3
    assert bounded == {"b": 3}


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit=0"):
        BoundedDict(0)
