"""Providers of each kind, at a place of the test's own."""

import pytest

from backends import StateStoreId
from tests.backends.providers.provider_cases import CONF, usually
from tests.backends.providers.third_provider import ThirdStateStoreProvider


# The third one is there for the interface of providers; test_model.py tries all of it in the usual run, too.
@pytest.fixture(params=usually(ThirdStateStoreProvider.backend))
def provider_class(request):
    return request.param


@pytest.fixture
def open_provider(provider_class, location):
    """Opens providers of the kind under test; closes them in the end."""
    made = []

    def opened(at=location, conf=CONF, **kwargs):
        made.append(provider_class(StateStoreId(at, "op", 0), conf, **kwargs))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "ck")


@pytest.fixture
def provider(open_provider):
    return open_provider()


@pytest.fixture
def with_list(provider):
    store = provider.get_store(0)
    store.create_column_family("list", use_multiple_values_per_key=True)
    store.create_column_family("map")
    store.commit()
    return provider
