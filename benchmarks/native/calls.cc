// Time of one collective in shared memory, called from C++. Each rank is a process, pinned to a separate core
// if the machine has enough cores. It makes `calls` calls of one verb and measures each call.
//
// Usage: calls VERB BYTES RANKS CALLS, with the number of the verb in fl_verb. For each rank it prints, in
// microseconds, the minimum, the quantiles 10, 50 and 90 %, and the mean over the whole loop.
//
// Compile it in the root of the repository:
// g++ -std=c++17 -O3 -pthread -I. benchmarks/native/calls.cc csrc/common/[!c]*.cc \
//   csrc/reduce/*.cc $(ls csrc/shm/*.cc | grep -v capi) -o calls
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../csrc/common/ticks.h"
#include "../../csrc/shm/group.h"

namespace {

constexpr double kSeconds = 60;

fl_signature call_of(int verb, size_t bytes, int ranks) {
  fl_signature s{};
  s.verb = verb;
  s.dtype = FL_FLOAT32;
  s.scale = 1;
  s.itemsize = sizeof(float);
  s.ndim = 1;
  s.count = s.shape[0] = static_cast<int64_t>(bytes / sizeof(float) / (verb == FL_SCATTER ? ranks : 1));
  return s;
}

double ticks_per_microsecond() {
  const int64_t ticks = fl_ticks(), now = fl_nanoseconds();
  usleep(50000);
  return 1000.0 * static_cast<double>(fl_ticks() - ticks) / static_cast<double>(fl_nanoseconds() - now);
}

void run(const std::string& path, int rank, int ranks, int verb, size_t bytes, int calls) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(rank % sysconf(_SC_NPROCESSORS_ONLN), &set);
  sched_setaffinity(0, sizeof set, &set);
  const bool creates = rank == 0;
  fl::Mapping mapping = creates ? fl::Mapping::create(path, fl::Segment::bytes_for(ranks)) : fl::Mapping();
  while (!creates && mapping.data() == nullptr) {
    try {
      mapping = fl::Mapping::open(path, fl::Segment::bytes_for(ranks));
    } catch (const std::exception&) {
      usleep(1000);
    }
  }
  fl::ShmGroup group(std::move(mapping), rank, ranks);
  const fl_signature s = call_of(verb, bytes, ranks), barrier = call_of(FL_BARRIER, 0, ranks);
  const fl_site here{"here"};
  std::vector<char> data(bytes + 64), output(bytes * ranks + 64);
  fl_room room{output.data(), bytes * ranks};
  const bool gathers = verb == FL_ALL_GATHER || verb == FL_GATHER;
  void* into = gathers ? static_cast<void*>(&room) : output.data();
  std::vector<double> took(calls);
  const double tick = ticks_per_microsecond();
  group.run({barrier, nullptr, nullptr, -1, kSeconds});
  const int64_t began = fl_ticks();
  for (double& one : took) {
    const int64_t start = fl_ticks();
    if (group.begin(s, data.data(), kSeconds, &here)) {
      group.ready(100);
      group.finish(s, data.data(), into);
    }
    one = static_cast<double>(fl_ticks() - start) / tick;
  }
  group.run({barrier, nullptr, nullptr, -1, kSeconds});
  const double mean = static_cast<double>(fl_ticks() - began) / tick / calls;
  std::sort(took.begin(), took.end());
  const auto quantile = [&](double part) { return took[static_cast<size_t>(part * (calls - 1))]; };
  std::printf("rank %d: %.3f least, %.3f, %.3f, %.3f; %.3f mean\n", rank, quantile(0), quantile(0.1),
              quantile(0.5), quantile(0.9), mean);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int verb = std::atoi(argv[1]), ranks = std::atoi(argv[3]), calls = std::atoi(argv[4]);
  const auto bytes = static_cast<size_t>(std::atol(argv[2]));
  const std::string path = "/dev/shm/flashlight-calls-" + std::to_string(getpid());
  for (int rank = 1; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    run(path, rank, ranks, verb, bytes, calls);
    return 0;
  }
  run(path, 0, ranks, verb, bytes, calls);
  while (wait(nullptr) > 0) {
  }
  unlink(path.c_str());
}
