"""Runs each property of a Suite on each of its tiny configurations."""


def pytest_generate_tests(metafunc):
    if metafunc.cls is None:
        return
    if "tiny" in metafunc.fixturenames:
        metafunc.parametrize("tiny", metafunc.cls.TINY.values(), ids=metafunc.cls.TINY.keys())
    if "real" in metafunc.fixturenames:
        metafunc.parametrize("real", metafunc.cls.REAL.items(), ids=metafunc.cls.REAL.keys())
