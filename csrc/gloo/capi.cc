// The C ABI: every exception becomes a status and a message.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "../reduce/reduce.h"
#include "group.h"

struct fl_group {
  fl::Group group;
};

struct fl_op {
  std::shared_ptr<fl::Operation> operation;
};

namespace {

void copy_message(const char* text, char* message, size_t bytes) {
  if (bytes == 0) return;
  std::strncpy(message, text, bytes - 1);
  message[bytes - 1] = '\0';
}

// An operation that could not even be started is one that has failed.
template <typename Start>
fl_op* started(Start start) {
  try {
    return new fl_op{start()};
  } catch (const std::exception& error) {
    auto failed = std::make_shared<fl::Operation>();
    failed->queue = std::make_shared<fl::Queue>();
    failed->status = FL_FAILED;
    failed->message = error.what();
    return new fl_op{failed};
  }
}

}  // namespace

extern "C" {

fl_group* fl_gloo_create(int rank, int size, const char* host, const char* interface,
                         double seconds, char* message, size_t message_bytes) {
  try {
    return new fl_group{{rank, size, host, interface, seconds}};
  } catch (const std::exception& error) {
    copy_message(error.what(), message, message_bytes);
    return nullptr;
  }
}

int fl_gloo_address(fl_group* group, int peer, char* address, size_t address_bytes) {
  try {
    const auto bytes = group->group.address(peer);
    if (bytes.size() > address_bytes) return -1;
    std::copy(bytes.begin(), bytes.end(), address);
    return static_cast<int>(bytes.size());
  } catch (const std::exception&) {
    return -1;
  }
}

fl_op* fl_gloo_connect(fl_group* group, const char* addresses, size_t address_bytes,
                       double seconds) {
  return started([&] {
    const size_t total = address_bytes * group->group.size();
    return group->group.connect({addresses, addresses + total}, address_bytes, seconds);
  });
}

fl_op* fl_gloo_run(fl_group* group, const fl_signature* signature, void* data, void* output,
                   int peer, double seconds) {
  return started([&] { return group->group.start(*signature, data, output, peer, seconds); });
}

fl_status fl_op_wait(fl_op* op, double seconds) {
  fl::Operation& operation = *op->operation;
  fl::Queue& queue = *operation.queue;
  const auto ended = [&] { return operation.status != FL_PENDING; };
  std::unique_lock<std::mutex> lock(queue.mutex);
  if (queue.done.wait_for(lock, std::chrono::duration<double>(seconds), ended)) {
    return operation.status;
  }
  if (queue.mesh != nullptr) queue.mesh->enforce_deadline();
  return FL_PENDING;
}

const char* fl_op_message(fl_op* op) { return op->operation->message.c_str(); }

int fl_op_missing(fl_op* op, int* ranks, int capacity) {
  const auto& missing = op->operation->missing;
  const int count = std::min(capacity, static_cast<int>(missing.size()));
  std::copy_n(missing.begin(), count, ranks);
  return count;
}

const fl_signature* fl_op_signatures(fl_op* op) { return op->operation->signatures.data(); }

void* fl_op_output(fl_op* op, size_t* bytes) {
  *bytes = op->operation->output.size;
  return op->operation->output.data.get();
}

void fl_op_free(fl_op* op) { delete op; }

void fl_gloo_close(fl_group* group) { delete group; }

int fl_reduce(int dtype, int op, double scale, void* into, const void* const* from, int ranks,
              size_t count) {
  return fl::reduce(dtype, op, scale, into, from, ranks, count);
}

}  // extern "C"
