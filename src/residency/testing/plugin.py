"""The pytest plugin: fixtures that lend a device to a test, and markers that set and judge it.

Pytest imports this at every start, also of projects that do not use it: torch is imported when the
first test takes a device, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "residency.testing.plugin is a pytest plugin, and pytest is not installed. "
        "Install it with: pip install 'residency[testing]'",
        name=error.name,
    ) from error

from residency._errors import BuildError, InvalidArgumentError, ResidencyError
from residency._units import format_bytes
from residency.testing._settings import (
    Request,
    expand_schedules,
    forget_name,
    make_request,
    name_device,
    simulated_device_type,
    tested_device_type,
)

if TYPE_CHECKING:
    import torch

    from residency.testing._loan import Lender

_LOAN = "_residency_device"  # every test that takes a device, one way or another, takes this
_LENDER = pytest.StashKey["Lender"]()
_REQUEST = pytest.StashKey[Request]()  # on the tests that take a device
_MARKERS = (
    "sim_device(capacity=, schedule=, check_races=, dry=, clock=, share=, workspaces=, context=): "
    "the test runs on the simulated accelerator with these settings; schedule may be 'all' or a "
    "list, for one run with each",
    "device_memory(limit=, growth=): the device has `limit` bytes during the test, which may leave "
    "at most `growth` bytes more allocated than it found; sizes as in '2GiB'",
)


# ---------------------------------------------------------------------------------- configuration


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the project's defaults."""
    parser.addini(
        "residency_device",
        "the simulated accelerator's name: sim, or cuda, for code that says 'cuda'",
        default="sim",
    )
    parser.addini("residency_capacity", "bytes of the simulated accelerator", default="8GiB")
    parser.addini(
        "residency_workspaces",
        "whether the simulated accelerator charges scratch memory of matrix products and sums",
        type="bool",
        default=False,
    )
    parser.addini(
        "residency_context",
        "bytes that a context takes of it, in tests that ask for no capacity of their own",
        default="0B",
    )
    parser.addini(
        "residency_schedules",
        "schedules that a test runs under, once with each; 'all' for every one",
        type="args",
        default=["late"],
    )
    # It fails by itself: what is skipped in silence covers nothing.
    parser.addini(
        "residency_missing",
        "a test's outcome if the simulated accelerator cannot be built: fail or skip",
        default="fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Announces the markers and checks the defaults."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    try:
        make_request([{n: config.getini(f"residency_{n}") for n in ("capacity", "context")}], [])
        _default_schedules(config)
    except InvalidArgumentError as error:
        raise pytest.UsageError(f"residency_capacity, _context or _schedules: {error}") from None
    try:
        if name_device(config.getini("residency_device")):
            config.add_cleanup(forget_name)
    except InvalidArgumentError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getini("residency_missing") not in ("fail", "skip"):
        raise pytest.UsageError(
            f"residency_missing is {config.getini('residency_missing')!r}; expected fail or skip."
        )


def _lender_of(config: pytest.Config) -> Lender:
    if _LENDER not in config.stash:
        from residency.testing._loan import Lender  # with torch: a test takes a device

        capture: Any = config.pluginmanager.getplugin("capturemanager")
        show = nullcontext if capture is None else capture.global_and_fixture_disabled
        config.stash[_LENDER] = Lender(show_build=show)
    return config.stash[_LENDER]


def _default_schedules(config: pytest.Config) -> list[str]:
    given = config.getini("residency_schedules")
    return expand_schedules("all" if given == ["all"] else given)


# ------------------------------------------------------------------------------------- collection


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Puts the device into CUDA's place before a test file asks whether CUDA is there."""
    config = session.config
    if config.getini("residency_device") == "cuda" and simulated_device_type() == "cuda":
        options = {name: config.getini(f"residency_{name}") for name in ("capacity", "context")}
        try:
            _lender_of(config).bring({"device": "cuda", **options})
        except ResidencyError as error:
            raise pytest.UsageError(f"residency_device is 'cuda': {error}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test a schedule, where there are several and no parameter names one."""
    test = metafunc.definition
    takes_device = _LOAN in metafunc.fixturenames or _has_marker(test)
    if not takes_device or simulated_device_type() is None or _is_parametrized(test):
        return
    marked = test.iter_markers("sim_device")
    given = next((mark.kwargs["schedule"] for mark in marked if "schedule" in mark.kwargs), None)
    try:
        schedules = (
            _default_schedules(metafunc.config) if given is None else expand_schedules(given)
        )
    except InvalidArgumentError as error:
        raise _failure(f"{test.nodeid}: {error}") from None
    if len(schedules) > 1:
        if _LOAN not in metafunc.fixturenames:
            metafunc.fixturenames.append(_LOAN)
        metafunc.parametrize(_LOAN, schedules, indirect=True)


def _has_marker(test: pytest.Item) -> bool:
    return any(test.get_closest_marker(name) for name in ("sim_device", "device_memory"))


def _is_parametrized(test: pytest.Function) -> bool:
    """Returns whether the settings come as an indirect parameter, which then names the schedule."""
    names: list[str] = []
    for mark in test.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        names += given.split(",") if isinstance(given, str) else given
    return "sim_device" in map(str.strip, names)


# ----------------------------------------------------------------------------------------- running


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Brings back settings that a failed test's tensors stood in the way of."""
    lender = item.config.stash.get(_LENDER, None)
    if lender is not None and lender.owes_settings:
        try:
            lender.come_to_rest()
        except ResidencyError as error:
            raise _failure(f"{type(error).__name__}: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Judges what the test's own lines left on the device, and reports the peak of a budget."""
    asked = item.stash.get(_REQUEST, None)
    if asked is None:
        return (yield)
    # Around the call alone: what a fixture holds is on both sides. Nothing is waited for before the
    # test's lines, which would hide a wait that is missing there.
    from residency.testing._watch import Watch  # with torch, which the test's device has brought

    watch = Watch(asked)
    try:
        result = yield
    except Exception as error:
        watch.explain(error)
        raise
    if asked.has_budget:
        _report_peaks(item, watch.peaks())
    if fault := watch.find_fault():
        raise _failure(fault)
    return result


def _report_peaks(item: pytest.Item, peaks: Mapping[str, int]) -> None:
    """Shows the peaks of a test with ``-rA``, and puts them into JUnit's file as properties."""
    item.user_properties += [(f"device_memory_{name}", size) for name, size in peaks.items()]
    sizes = {name: format_bytes(size) for name, size in peaks.items()}
    limit = f" of {sizes['limit_bytes']}" if "limit_bytes" in sizes else ""
    item.add_report_section(
        "call",
        "device memory",
        f"tensors held at most {sizes['peak_held_bytes']}; the allocator had reserved at most "
        f"{sizes['peak_reserved_bytes']}{limit}\n",
    )


def _request_of(item: pytest.Item) -> Request:
    def given(marker: str) -> list[Mapping[str, object]]:
        marks = list(item.iter_markers(marker))
        for mark in marks:
            if mark.args:
                raise InvalidArgumentError(
                    f"{marker} takes keywords only; found {mark.args[0]!r} without one."
                )
        return [mark.kwargs for mark in reversed(marks)]  # the closest one last

    parameters = getattr(getattr(item, "callspec", None), "params", {})
    sim_options = given("sim_device")
    if "sim_device" in parameters:
        sim_options.append(parameters["sim_device"])
    if _LOAN in parameters:
        sim_options.append({"schedule": parameters[_LOAN]})
    return make_request(sim_options, given("device_memory"))


# ---------------------------------------------------------------------------------------- fixtures


@pytest.fixture(autouse=True)
def _residency_markers(request: pytest.FixtureRequest) -> None:
    """Lets a test whose marker speaks of the device take it, before its other fixtures."""
    if _has_marker(request.node):
        request.getfixturevalue(_LOAN)


@pytest.fixture
def _residency_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device that the test runs on, lent for its time."""
    config, lender = request.config, _lender_of(request.config)
    face = simulated_device_type()
    device_type = tested_device_type()
    if face is None and _needs_simulator(request):
        pytest.skip(f"needs the simulated accelerator; RESIDENCY_TEST_DEVICE is {device_type!r}")
    try:
        asked = request.node.stash[_REQUEST] = _request_of(request.node)
        if face is not None:
            defaults = {
                "device": face,
                "capacity": config.getini("residency_capacity"),
                "schedule": _default_schedules(config)[0],
                "check_races": True,
                # Off by default: tests compute their bounds from the bytes of tensors.
                "workspaces": config.getini("residency_workspaces"),
                "context": config.getini("residency_context"),
            }
            if asked.limit is not None or "capacity" in asked.sim_options:
                defaults["context"] = "0B"  # all of what a test asks for is for its tensors
            limit = {} if asked.limit is None else {"capacity": asked.limit}
            loan = lender.lend_simulated(defaults | dict(asked.sim_options) | limit)
        else:
            loan = lender.lend_real(device_type, asked.limit_bytes)
        with loan as device:
            yield device
    except BuildError as error:
        if config.getini("residency_missing") == "skip":
            pytest.skip(str(error))
        hint = "(residency_missing = skip in pytest's configuration leaves such tests out.)"
        raise _failure(f"{error}\n{hint}") from None
    except ResidencyError as error:
        raise _failure(f"{type(error).__name__}: {error}") from None


def _failure(message: str) -> BaseException:
    return pytest.fail.Exception(message, pytrace=False)  # the lines of this file say nothing


def _needs_simulator(request: pytest.FixtureRequest) -> bool:
    if "tested_device" in request.fixturenames:
        return False
    is_marked = request.node.get_closest_marker("sim_device") is not None
    return is_marked or "sim_device" in request.fixturenames


@pytest.fixture
def sim_device(_residency_device: torch.device) -> torch.device:
    """The simulated accelerator, empty, with races checked, and as the marker of its name says.

    Left out where ``RESIDENCY_TEST_DEVICE`` names a real accelerator: one process has room for one
    of the two.
    """
    return _residency_device


@pytest.fixture
def tested_device(_residency_device: torch.device) -> torch.device:
    """The accelerator under test, empty: the simulated one, or ``RESIDENCY_TEST_DEVICE``."""
    return _residency_device
