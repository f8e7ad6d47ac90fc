import pytest

pytest.importorskip("PIL")  # as ligermodels.vision needs it
