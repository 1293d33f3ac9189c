// What ranks do with each other; each play is given the same random numbers on every rank.
#pragma once

#include "../../../csrc/reduce/reduce.h"
#include "../random.h"
#include "world.h"

namespace stress {

void play_collective(Rank& rank, Random& random, uint64_t step);

// Messages between all, with several tags, begun in any order and in any way, on several threads.
void play_messages(Rank& rank, Random& random, uint64_t step);

// Messages to one rank that knows neither who sends nor how much.
void play_open_receives(Rank& rank, Random& random, uint64_t step);

// Messages and collectives whose ends differ.
void play_mismatches(Rank& rank, Random& random, uint64_t step);

// Groups of some ranks, beside each other and the whole, which goes on whatever becomes of them.
void play_groups(Rank& rank, Random& random, uint64_t step);

// How a world ends: one rank leaves, or is late, while the others wait for it.
void play_the_end(Rank& rank, Random& random);

}  // namespace stress
