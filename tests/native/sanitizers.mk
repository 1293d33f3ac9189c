# Common part of the Makefiles of stress tests, which define OBJECTS, the rules for them, and RUNS, the default
# amount per configuration. Flags as in csrc/build.py, but with less optimisation, so that sanitizers detect
# more.

SEED ?= 1
CXXFLAGS := -std=c++17 -Wall -Wextra -Werror -g1 -ffp-contract=off -pthread
FLAGS_plain := -O2
FLAGS_address := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
FLAGS_thread := -O1 -fsanitize=thread

export ASAN_OPTIONS := detect_leaks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS := print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1

# Sanitizers of GCC 12 cannot place their shadow memory if new kernels randomise addresses further; not
# every container permits to disable that.
FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: plain address thread
.SECONDARY:
plain address thread: %: $(OUT)/%/stress
	@printf '%-9s' $@:
	@$(or $(EMULATOR),$(FIXED)) $< $(or $(RUNS),$(RUNS_$*)) $(SEED)
