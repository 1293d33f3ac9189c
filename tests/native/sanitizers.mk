# What the Makefiles of stress tests have in common: OBJECTS and how each is compiled are theirs, as is RUNS, how
# much a configuration tries by default. As csrc/build.py says, but for the sanitizers, which see more with less
# optimisation.

SEED ?= 1
CXXFLAGS := -std=c++17 -Wall -Wextra -Werror -g1 -ffp-contract=off -pthread
FLAGS_plain := -O2
FLAGS_address := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
FLAGS_thread := -O1 -fsanitize=thread

export ASAN_OPTIONS := detect_leaks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS := print_stacktrace=1
export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1

# Sanitizers of GCC 12 cannot place their shadow where new kernels randomise addresses further; not
# every container lets a program switch that off.
FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: plain address thread
.SECONDARY:
plain address thread: %: $(OUT)/%/stress
	@printf '%-9s' $@:
	@$(or $(EMULATOR),$(FIXED)) $< $(or $(RUNS),$(RUNS_$*)) $(SEED)
