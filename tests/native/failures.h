// Ranks that leave or close their group: the other ranks detect it. Rounds of tests/chaos kill ranks.
#pragma once

#include "random.h"

namespace stress {

// Each function returns after all ranks have ended. A failed check ends the program.
void test_leaving_after_a_small_part();
void test_closing_while_busy(Random& random);
void test_closing_in_a_handler(Random& random);
void test_out_of_memory();
void test_going_ahead(Random& random);
void test_going_too_far_ahead();

void test_closing_with_messages(Random& random);
void test_breaking_with_messages(Random& random);
void test_late_refusal(Random& random);

// Compare the kernels of all instruction sets; return the number of reductions.
long test_kernels(uint64_t seed, long rounds);

}  // namespace stress
