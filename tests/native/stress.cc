// stress ROUNDS [SEED]: random tests of csrc/shm and csrc/reduce against their contracts.

#include "calls.h"
#include "check.h"
#include "failures.h"
#include "ranks.h"
#include "world.h"

namespace {

using namespace stress;

constexpr int kCallsInAWorld = 12;

struct Course {
  int ranks;
  uint32_t calls_before;
  size_t largest_bytes;
  bool processes;
};

// Seconds that a world may take on a busy machine; a hanging world ends the program.
constexpr unsigned kPatience = 200;

void one_world(uint64_t seed, const Course& course) {
  alarm(kPatience);
  Random random(seed);
  random.one_in(2) ? setenv("FLASHLIGHT_CHECKS", "sync", 1) : unsetenv("FLASHLIGHT_CHECKS");
  World world(course.ranks, course.calls_before, {course.largest_bytes + 16384, 65536 + 4096});
  Author author(world, Random(random.bits()), course.largest_bytes);
  const Script script = author.write(kCallsInAWorld);
  situation() = "world of seed " + std::to_string(seed) + ", " + std::to_string(course.ranks) +
                " ranks" + (course.processes ? " in processes" : "") + ", after " +
                std::to_string(course.calls_before) + " calls";
  const auto run = [&](int rank) {
    if (course.processes) alarm(kPatience);  // not inherited
    const auto group = world.join(rank);
    Player(*group, rank, world.regions).play(script.steps[rank]);
  };  // and leave at once, while other ranks may continue
  course.processes ? in_processes(course.ranks, run) : in_threads(course.ranks, run);
}

// Mostly 1 to 8 ranks with arrays of several chunks; occasionally many ranks.
Course some_course(Random& random, long number) {
  Course course{1 + static_cast<int>(random.below(8)), 0, 0, false};
  if (random.one_in(2)) course.calls_before = 0u - static_cast<uint32_t>(random.below(30));
  course.processes = !kOneAddress && random.one_in(3);
  // Slots are reused from the fifth chunk on.
  course.largest_bytes = random.one_in(2) ? 600000 : course.ranks > 4 ? 1700000 : 2300000;
  if (number % 40 == 20) {
    const int crowds[] = {13, 34, 66, 96};
    course.ranks = crowds[number / 40 % 4];
    course.largest_bytes = 60000;
  }
  return course;
}

// Here all sends, also small ones, wait for their receivers.
void failures(Random& random, long rounds) {
  alarm(2 * kPatience);
  setenv("FLASHLIGHT_CHECKS", "sync", 1);
  if (!kOneAddress) test_leaving_after_a_small_part();
  test_going_too_far_ahead();
  for (long i = 0; i < rounds; ++i) {
    test_closing_while_busy(random);
    test_closing_in_a_handler(random);
    test_closing_with_messages(random);
    test_going_ahead(random);
    if (i % 8 == 0) test_breaking_with_messages(random);
  }
  unsetenv("FLASHLIGHT_CHECKS");
  test_late_refusal(random);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  test_out_of_memory();  // the sanitizers' allocators end the program instead
#endif
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: stress ROUNDS [SEED]\n");
    return 2;
  }
  const long rounds = std::atol(argv[1]), worlds = rounds / kCallsInAWorld + 1;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const auto started = std::chrono::steady_clock::now();
  Random random(seed);
  failures(random, worlds / 8 + 1);
  long calls = 0;
  for (long i = 0; i < worlds; ++i, calls += kCallsInAWorld) {
    one_world(seed * 1000000 + i, some_course(random, i));
  }
  const long reductions = test_kernels(seed, worlds / 4 + 1);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::printf(
      "%ld calls in %ld worlds, %ld failures, %ld reductions by every instruction set: "
      "all right (%.0f s, seed %llu)\n",
      calls, worlds, worlds / 8 + 1, reductions, seconds, static_cast<unsigned long long>(seed));
  return 0;
}
