"""Calls like one that was made before: its launches again, with other addresses.

What a launcher or a `Decoder` checks and decides depends on its scalars, on which pointers are arrays, and on
these arrays' type, dtype, shape and strides. Where all of that was met before, only the addresses are left to
look at. All of it is compared at each call, so an array that was reshaped, or another one, is seen; 3 is told
from 3.0 and from True. Nothing is kept of a call that raised, nor any array.

A call that comes again with the same addresses on the same stream is one look-up: what the driver takes is
kept ready (`GpuBackend.prepare`). Of equal calls two go the whole way, the next two skip the checks, and from
the fifth on they are ready.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cupaged.launch import NO_OBJECTS, Launched, is_watched, issue, recording

if TYPE_CHECKING:
    from cupaged.backends.base import GpuBackend

__all__ = ["WarmCall", "WarmCalls"]

# What is kept: sets of scalars; for each, kinds of pointers, and the parameters (a few hundred bytes) for as
# many addresses as there are layers times buffers that take turns; calls, by all that they were given.
_MAX_CALLS = 64
_MAX_KINDS = 16
_MAX_ADDRESSES = 512
_MAX_EXACT = 512
_VALUE_TYPES = frozenset({int, float, bool, type(None)})  # equal ones are the same to a kernel
_ADDRESS_TYPES = frozenset({int, type(None)})  # None: left out
_Addresses = tuple[int, ...]  # 0 where it is left out
_Nulls = tuple[bool, ...]
_Views = tuple[Any, ...]  # of a call's pointers, as `GpuBackend.views` returns them
_Packed = tuple[tuple["_Again", bytes], ...]
_Prepared = tuple[Callable[[], None], ...]


class _Again(NamedTuple):
    """One launch that is made again.

    Attributes:
        launched: as it was made the first time.
        constants: values that come from no pointer of the call.
        in_order: puts addresses and then constants into the order of the kernel's parameters.
        sources: (parameter position, position among the call's pointers).
    """

    launched: Launched
    constants: tuple[Any, ...]
    in_order: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    sources: tuple[tuple[int, int], ...]

    def objects(self, pointers: tuple[Any, ...]) -> Mapping[int, Any]:
        """Parameter position -> what is given for it, where that is neither an address nor left out."""
        given = {i: pointers[j] for i, j in self.sources if type(pointers[j]) not in _ADDRESS_TYPES}
        return {**self.launched.objects, **given}

    def prepare(self, parameters: bytes, stream: int, pointers: tuple[Any, ...]) -> Callable[[], None] | None:
        """As `GpuBackend.prepare`."""
        kernel, loaded, grid, block, shared_mem, cooperative, overlapping, _, _ = self.launched
        return kernel.gpu.prepare(
            loaded, grid, block, shared_mem, parameters, kernel.layout.offsets, stream,
            self.objects(pointers), cooperative, overlapping,
        )  # fmt: skip


class _Call(NamedTuple):
    """All launches of a call, and what its addresses must be multiples of, in bytes."""

    multiples: tuple[int, ...]
    launches: tuple[_Again, ...]

    def pack(self, addresses: _Addresses) -> _Packed | None:
        """The launches with their parameters; None where an address is not as it must be."""
        for address, multiple in zip(addresses, self.multiples, strict=True):
            if address % multiple or address >> 64:
                return None
        return tuple(
            [
                (again, again.launched.kernel.pack(*again.in_order(addresses + again.constants)))
                for again in self.launches
            ]
        )


class WarmCall:
    """What a launcher or a decoder did for one set of scalars, by kind of its pointers.

    Args:
        gpu: the backend.
        names: of the pointers that a call gives, the same as of the kernels' parameters.

    Attributes:
        met: whether there was a call with these scalars. What the first one launched is not kept, so scalars
            that come once (lengths that grow) cost little more than their checks.
    """

    __slots__ = ("_calls", "_gpu", "_names", "_packed", "_prepared", "met")

    def __init__(self, gpu: GpuBackend, names: Sequence[str]) -> None:
        self._gpu = gpu
        self._names = names
        self.met = False
        # Which pointers are null decides too: what may be left out, and what then must be given.
        self._calls: dict[tuple[_Views, _Nulls], _Call] = {}
        self._packed: dict[_Views, _Packed] = {}
        self._prepared: dict[tuple[_Views, int], _Prepared] = {}

    def launch(self, pointers: tuple[Any, ...], stream: Any) -> _Prepared | None:
        """Launch as a call like this one did.

        Args:
            pointers: in the order of their names; None for one that is left out.
            stream: as launchers take it.

        Returns:
            the launches, to be made again; empty where they are not prepared. None: nothing was done, the
            call must go the whole way.
        """
        if not self._calls or is_watched():
            return None
        is_bare = _ADDRESS_TYPES.issuperset(map(type, pointers))
        views = pointers if is_bare else self._gpu.views(pointers)
        if views is None:
            return None
        handle = stream if type(stream) is int and stream >= 0 else self._gpu.stream_handle(stream)
        prepared = self._prepared.get((views, handle))
        if prepared is None:
            return self._launch_packed(views, pointers, handle)
        for launch in prepared:
            launch()
        return prepared

    def _launch_packed(self, views: _Views, pointers: tuple[Any, ...], stream: int) -> _Prepared | None:
        known = self._packed.get(views)
        packed = known or self._pack(views)
        if packed is None:
            return None
        for again, parameters in packed:
            # Addresses are their own views.
            objects = again.launched.objects if views is pointers else again.objects(pointers)
            issue(again.launched, parameters, stream, objects)
        if known is None:
            return ()
        launches = [again.prepare(parameters, stream, pointers) for again, parameters in known]
        prepared = tuple(x for x in launches if x is not None)
        if len(prepared) < len(launches):
            return ()
        _put(self._prepared, (views, stream), prepared, _MAX_ADDRESSES)
        return prepared

    def _pack(self, views: _Views) -> _Packed | None:
        """The launches for addresses that are new; None where nothing like it is known, or one is wrong."""
        addresses, kinds = _split(views)
        call = self._calls.get((kinds, _nulls(addresses)))
        packed = None if call is None else call.pack(addresses)
        if packed is not None:
            _put(self._packed, views, packed, _MAX_ADDRESSES)
        return packed

    def keep(self, pointers: tuple[Any, ...], launches: list[Launched]) -> None:
        """Remember what a call with these pointers launched, where they are ints and the backend's arrays."""
        views = self._gpu.views(pointers)
        if views is None:
            return
        addresses, kinds = _split(views)
        multiples = [1] * len(addresses)
        again = []
        for launched in launches:
            sources = self._sources(launched)
            if any(launched.values[i] != addresses[j] for i, j in sources):
                return
            asked = dict(launched.kernel.pointer_multiples)
            for i, j in sources:
                multiples[j] = math.lcm(multiples[j], asked.get(i, 1))
            again.append(_again(launched, sources, len(addresses)))
        _put(self._calls, (kinds, _nulls(addresses)), _Call(tuple(multiples), tuple(again)), _MAX_KINDS)

    def _sources(self, launched: Launched) -> tuple[tuple[int, int], ...]:
        """(Parameter position, pointer position) of the parameters that take a pointer of the call."""
        place = {name: j for j, name in enumerate(self._names)}
        parameters = enumerate(launched.kernel.parameters)
        return tuple((i, place[p.name]) for i, p in parameters if p.kind == "ptr" and p.name in place)


class _Storing(threading.local):
    """What this thread wants kept: by whom, of a call with which arguments (by their ids), its launches."""

    call: tuple[WarmCalls, list[int], _Prepared] | None = None


_storing = _Storing()


class WarmCalls:
    """The same for all scalars that a launcher with one handle, or a decoder, has met.

    Args:
        gpu: the backend.
        names: of the pointers that a call gives.

    Attributes:
        of: gives the `WarmCall` of these scalars, which are told apart by value and by type. TypeError where
            one cannot be hashed.
    """

    def __init__(self, gpu: GpuBackend, names: Sequence[str]) -> None:
        def new(*_: Any, **__: Any) -> WarmCall:
            return WarmCall(gpu, names)

        def prepared(*given: Any, **options: Any) -> _Prepared:
            if _storing.call is None:
                raise LookupError
            owner, ids, launches = _storing.call
            # A finaliser that runs while a call is stored may make another one.
            if owner is not self or ids != _ids(given, options):
                raise LookupError
            return launches

        self.of = functools.lru_cache(maxsize=_MAX_CALLS, typed=True)(new)
        self._exact = functools.lru_cache(maxsize=_MAX_EXACT, typed=True)(prepared)
        self._is_any_stored = False

    def again(self, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Launch what exactly this call launched; False: nothing was done, `call` must.

        Args:
            given: all arguments by position, addresses as ints and the stream as its handle.
            options: those by keyword.
        """
        if not self._is_any_stored:  # as where addresses never come back: the look-up would cost for nothing
            return False
        try:
            prepared = self._exact(*given, **options)
        except (LookupError, TypeError):  # not known; one cannot be hashed
            return False
        if is_watched():
            return False
        for launch in prepared:
            launch()
        return True

    def call(
        self,
        given: tuple[Any, ...],
        options: dict[str, Any],
        scalars: tuple[Any, ...],
        pointers: tuple[Any, ...],
        stream: Any,
        anew: Callable[[], None],
    ) -> None:
        """Launch as before, or go the whole way.

        Args:
            given, options: as `again` takes them.
            scalars: those of given.
            pointers, stream: as `WarmCall.launch` takes them.
            anew: checks and launches.
        """
        try:
            warm = self.of(*scalars, **options)
        except TypeError:  # one cannot be hashed
            warm = None
        prepared = None if warm is None else warm.launch(pointers, stream)
        if prepared is None:
            self._go(warm, (*scalars, *options.values()), pointers, anew)
        elif prepared and type(stream) is int and _ADDRESS_TYPES.issuperset(map(type, pointers)):
            _storing.call = self, _ids(given, options), prepared
            try:
                self._exact(*given, **options)
            finally:
                _storing.call = None
            self._is_any_stored = True

    def _go(
        self,
        warm: WarmCall | None,
        scalars: Iterable[Any],
        pointers: tuple[Any, ...],
        anew: Callable[[], None],
    ) -> None:
        """Go the whole way; keep what is launched if these scalars come for the second time.

        Args:
            warm: from `of`; None where scalars cannot be hashed.
            scalars: of this call.
            pointers: as `WarmCall.launch` takes them.
            anew: checks and launches.
        """
        try:
            if warm is None or not warm.met:
                anew()
                launches = []
            else:
                with recording() as launches:
                    anew()
        except BaseException:
            self.of.cache_clear()  # it holds the scalars, which may be anything
            raise
        if warm is not None:
            warm.met = True
            # 0.0 and -0.0 are equal, but not one value.
            if launches and all(
                type(x) in _VALUE_TYPES and not (type(x) is float and x == 0) for x in scalars
            ):
                warm.keep(pointers, launches)


def _ids(given: tuple[Any, ...], options: dict[str, Any]) -> list[int]:
    return [id(x) for x in (*given, *options.keys(), *options.values())]


def _put(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


def _split(views: _Views) -> tuple[_Addresses, _Views]:
    """Addresses, and the rest of what is known of each pointer."""
    kinds: _Views = tuple(map(type, views))
    if _ADDRESS_TYPES.issuperset(kinds):
        return tuple([view or 0 for view in views]), kinds
    addresses = tuple(
        [view[0] if kind is tuple else view or 0 for kind, view in zip(kinds, views, strict=True)]
    )
    return addresses, tuple(
        [view[1:] if kind is tuple else kind for kind, view in zip(kinds, views, strict=True)]
    )


def _nulls(addresses: _Addresses) -> _Nulls:
    return tuple(map(operator.not_, addresses))


def _again(launched: Launched, sources: tuple[tuple[int, int], ...], num_addresses: int) -> _Again:
    """A launch without the pointers and arrays that come anew with each call."""
    from_call = dict(sources)
    fixed = [i for i in range(len(launched.values)) if i not in from_call]
    places = from_call | {i: num_addresses + n for n, i in enumerate(fixed)}
    objects = {i: x for i, x in launched.objects.items() if i not in from_call}
    constants = tuple(launched.values[i] for i in fixed)
    return _Again(
        launched._replace(values=(), objects=objects or NO_OBJECTS),
        constants,
        operator.itemgetter(*[places[i] for i in range(len(places))]),
        sources,
    )
