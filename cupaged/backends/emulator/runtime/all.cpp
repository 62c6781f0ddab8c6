// The runtime library in one translation unit: compiling it takes a third of the time of its parts.
#include "async_copy.cpp"
#include "collectives.cpp"
#include "context_switch.cpp"
#include "launch.cpp"
#include "matrix.cpp"
#include "mbarrier.cpp"
#include "prefetch.cpp"
#include "report.cpp"
#include "scheduler.cpp"
#include "shared_memory.cpp"
#include "stack_pool.cpp"
#include "warp_operations.cpp"

#ifdef CUPAGED_EMULATOR_CHECK
#include "check/access.cpp"
#include "check/clock.cpp"
#include "check/instrumentation.cpp"
#include "check/order.cpp"
#include "check/session.cpp"
#include "check/shadow.cpp"
#endif
