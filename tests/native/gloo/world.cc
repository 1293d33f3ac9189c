#include "world.h"

#include <algorithm>
#include <cstring>

#include "../../../csrc/reduce/reduce.h"

namespace stress {

void Rank::create() {
  group_ = fl_gloo_create(rank, size, "127.0.0.1", "", 60);
  check(group_ != nullptr, fl_error());
}

std::vector<char> Rank::address() {
  char address[256];
  const int bytes = fl_address(group_, address, sizeof address);
  check(bytes > 0, "no address");
  return {address, address + bytes};
}

void Rank::connect(const std::vector<char>& addresses, bool lazily) {
  const std::vector<char> key(FL_KEY_BYTES);  // equal on all ranks
  check_ok(fl_connect(group_, addresses.data(), addresses.size() / size, key.data(), lazily, 60), "connect");
}

Rank Rank::part(const std::vector<int>& ranks, uint64_t number) const {
  const int size = static_cast<int>(ranks.size());
  const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return {static_cast<int>(place), size, fl_gloo_part(group_, ranks.data(), size, number)};
}

void Rank::close() {
  if (group_ == nullptr) return;
  fl_close(group_);
  fl_free(group_);
  group_ = nullptr;
}

fl_op* Rank::run(const fl_signature& signature, void* data, void* output, int peer, bool async) {
  return fl_run(group_, &signature, data, output, peer, seconds, async ? 1 : 0, nullptr);
}

fl::Handle Rank::called(const fl::Request& call, int async) {
  return fl::Handle(
      fl_run(group_, &call.signature, call.data, call.output, call.peer, call.seconds, async, call.site));
}

std::vector<fl::Handle> Rank::exchange(const fl_message* messages, int count, double seconds, bool async) {
  std::vector<fl_op*> results(count);
  fl_exchange(group_, messages, count, seconds, async ? 1 : 0, results.data());
  return {results.begin(), results.end()};
}

void Rank::play(const Script& script) {
  Regions none;
  Player<Rank>(*this, rank, none).play(script.steps[rank]);
}

fl_signature signature_of(int verb, size_t count, int root) {
  return signature_of(verb, FL_UINT32, sizeof(uint32_t), count, root);
}

fl_status ended(fl_op* op) {
  if (op == nullptr) return FL_OK;
  fl_status status;
  while ((status = fl_op_wait(op, 0.1)) == FL_PENDING) {
  }
  fl_op_free(op);
  return status;
}

void check_ok(fl_op* op, const char* what) {
  if (op == nullptr) return;
  while (fl_op_wait(op, 0.1) == FL_PENDING) {
  }
  check(fl_op_wait(op, 0) == FL_OK, std::string(what) + ": " + fl_op_message(op));
  fl_op_free(op);
}

}  // namespace stress
