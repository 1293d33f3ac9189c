// Random calls of all ranks with their expected results: collectives in calls.cc and parts.cc, messages in
// letters.cc, mismatches in mismatches.cc.
#pragma once

#include "random.h"
#include "script.h"

namespace stress {

class Author {
 public:
  Author(const Shape& world, Random random, size_t largest_bytes);

  Script write(int calls);

 private:
  void add_call();
  void add_reduction(int verb);
  void add_scan(int verb);
  void add_reduce_scatter();
  void add_broadcast();
  void add_gather(int verb);
  void add_scatter();
  void add_all_to_all();
  void add_uneven_all_to_all();
  void add_uneven_reduce_scatter();
  void add_exchange(int verb, int dtype, std::vector<int64_t> bytes);
  void add_reduced_sections(const fl_signature& signature, const std::vector<size_t>& counts);
  void add_barrier();
  void add_message();
  void add_ring();
  void add_letters();
  void add_open_receives();
  void add_mismatch();
  void add_root_that_knows_nothing();
  void add_message_mismatch();
  void add_or_drop_region();

  size_t some_bytes();
  size_t some_count(int itemsize);
  int some_op();
  int some_dtype(int op);
  int some_root() { return static_cast<int>(random_.below(world_.ranks)); }
  double some_scale(int dtype);
  fl_signature signature(int verb, int dtype, int op, int root, double scale, size_t count);
  Step step(const fl_signature& signature, Block data);
  void place(std::vector<Step>& call, size_t bytes);
  struct Letter;
  Letter letter(int from, int to, size_t count, int dtype, int tag);
  Letter misfit(int from, int to, size_t count, int dtype, int tag);
  Letter some_letter(int from, int to, int tag, size_t largest_bytes);
  std::vector<size_t> some_order(const std::vector<Letter*>& letters, int rank);
  std::vector<Block> inputs(int dtype, size_t count, bool numbers);
  Block made(int dtype, size_t count, bool numbers);
  void push(std::vector<Step> call);
  void push_mismatch(std::vector<Step> call);
  Step mismatched(const fl_signature& signature);
  fl_signature other_than(const fl_signature& base);
  void forget_some(std::vector<Step>& call, int odd_one);

  const Shape& world_;
  Random random_;
  const size_t largest_;
  Script script_;
  std::vector<bool> added_, dropped_;
  int next_tag_ = 1 << 20;  // for receives from any rank; no other message uses them
};

}  // namespace stress
