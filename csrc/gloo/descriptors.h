// The descriptors of a group's sockets. In a child that was forked a connection lives on as long as the
// child: peers would not notice that a rank was killed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <system_error>

namespace fl {

// A call of the system has failed.
[[noreturn]] inline void fail_in(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

// One, and what it is: its number may come to mean something else.
struct Descriptor {
  int number = -1;  // none
  dev_t device = 0;
  ino_t inode = 0;

  static Descriptor of(int number) noexcept;
  // In a forked child: whatever has used its number meanwhile stays open.
  void close_if_same() const noexcept;
};

class Descriptors {
 public:
  explicit Descriptors(size_t most) : found_(new Descriptor[most]), most_(most) {}

  // One thread at a time. Beyond so many as were announced they are not remembered.
  void add(int descriptor);

  // Close those that are still the same, in a forked child: whatever other threads did just then.
  void close_all() const noexcept;

 private:
  const std::unique_ptr<Descriptor[]> found_;
  const size_t most_;
  std::atomic<size_t> count_{0};
};

}  // namespace fl
