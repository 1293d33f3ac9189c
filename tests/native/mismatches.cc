// Messages between two ranks, and calls that do not match.
#include <algorithm>
#include <utility>

#include "calls.h"
#include "reference.h"

namespace stress {

// Messages ------------------------------------------------------------------------------------

void Author::message(int from, int to, size_t count, int dtype, int tag) {
  const Block given = made(dtype, count, false), before = made(dtype, count, false);
  Step send = step(signature(FL_SEND, dtype, 0, tag, 1.0, count), given);
  send.peer = to;
  Step receive = step(signature(FL_RECV, dtype, 0, tag, 1.0, count), before);
  receive.peer = from;
  receive.data_after = given;
  script_.steps[from].push_back(std::move(send));
  script_.steps[to].push_back(std::move(receive));
}

void Author::add_message() {
  if (world_.ranks == 1) return;
  const int from = some_root();
  const int to = (from + 1 + static_cast<int>(random_.below(world_.ranks - 1))) % world_.ranks;
  const int dtype = some_dtype(fl::kMin);
  const bool empty = random_.one_in(2);  // what is empty is only a handshake, as a mismatch is
  const int number = 1 + static_cast<int>(random_.below(empty ? 30 : 3));
  for (int i = 0; i < number; ++i) {
    message(from, to, empty ? 0 : some_count(info_of(dtype).itemsize), dtype, i);
  }
}

// Neighbour to neighbour; each call is in order on both sides.
void Author::add_ring() {
  if (world_.ranks == 1) return;
  const int dtype = some_dtype(fl::kMin);
  for (int r = 0; r < world_.ranks; ++r) {
    message(r, (r + 1) % world_.ranks, some_count(info_of(dtype).itemsize), dtype, 7);
  }
}

// Mismatches ----------------------------------------------------------------------------------

Step Author::mismatched(const fl_signature& s) {
  const size_t parts = s.verb == FL_SCATTER ? world_.ranks : 1;
  const bool has_data = s.verb != FL_BARRIER;
  Step wrong = step(s, has_data ? made(s.dtype, s.count * parts, false) : nullptr);
  wrong.status = FL_MISMATCH;
  const bool has_output =
      s.verb == FL_REDUCE_SCATTER || s.verb == FL_SCATTER || s.verb == FL_ALL_TO_ALL;
  wrong.output_bytes = has_output ? s.count * s.itemsize : 0;
  return wrong;
}

void Author::add_mismatch() {
  if (world_.ranks == 1) return;
  const int verbs[] = {FL_ALL_REDUCE, FL_REDUCE_SCATTER, FL_BROADCAST, FL_ALL_GATHER, FL_BARRIER,
                       FL_REDUCE,     FL_GATHER,         FL_SCATTER,   FL_ALL_TO_ALL};
  const int dtype = some_dtype(fl::kMin), ranks = world_.ranks;
  const size_t count = some_count(info_of(dtype).itemsize) / ranks * ranks;
  const fl_signature base = signature(verbs[random_.below(9)], dtype, 2, 0, 1.0, count);
  fl_signature other = base;
  switch (random_.below(6)) {
    case 0:
      other.verb = base.verb == FL_BARRIER ? FL_REDUCE : FL_BARRIER;
      break;
    case 1:
      other = signature(base.verb, dtype == 1 ? 2 : 1, 2, 0, 1.0, count);
      break;
    case 2:
      other.op = 3;
      break;
    case 3:
      other.root = ranks - 1;
      break;
    case 4:
      other.scale = 0.5;
      break;
    default:
      other = signature(FL_ALL_REDUCE, dtype, 2, 0, 1.0, count + ranks);
      break;
  }
  const int odd_one = some_root();
  std::vector<Step> call;
  std::vector<fl_signature> seen;
  for (int r = 0; r < ranks; ++r) {
    call.push_back(mismatched(r == odd_one ? other : base));
    seen.push_back(call[r].signature);
    seen[r].sequence = 1;
  }
  for (Step& one : call) one.seen = seen;
  size_t most = 0;
  for (const Step& one : call) most = std::max(most, one.data == nullptr ? 0 : one.data->size());
  if (random_.one_in(2)) place(call, most);
  for (Step& one : call) {
    if (one.data == nullptr) one.region = -1;
  }
  push(std::move(call));
}

void Author::add_message_mismatch() {
  if (world_.ranks == 1) return;
  const int from = some_root(), to = (from + 1) % world_.ranks;
  const int dtype = some_dtype(fl::kMin);
  const size_t count = some_count(info_of(dtype).itemsize);
  for (int i = 0; i < 5; ++i) {
    Step send = mismatched(signature(FL_SEND, dtype, 0, i, 1.0, count));
    Step receive = mismatched(i % 2 != 0 ? signature(FL_RECV, dtype, 0, i, 1.0, count + 1)
                                         : signature(FL_RECV, dtype == 1 ? 2 : 1, 0, i, 1.0, count));
    send.peer = to;
    receive.peer = from;
    std::vector<fl_signature> seen(world_.ranks);
    seen[from] = send.signature;
    seen[to] = receive.signature;
    seen[from].sequence = seen[to].sequence = 1;
    send.seen = receive.seen = seen;
    script_.steps[from].push_back(std::move(send));
    script_.steps[to].push_back(std::move(receive));
  }
}

}  // namespace stress
