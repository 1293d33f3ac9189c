#include "descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/loop.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "line.h"

namespace fl {
namespace {

namespace tcp = gloo::transport::tcp;

// Private members are named in explicit instantiations, where access is not checked: a Gloo that
// has others does not compile.
template <typename Of, typename Of::Member member>
struct Reveal {
  friend typename Of::Member reveal(Of) { return member; }
};

struct DeviceLoop {
  using Member = std::shared_ptr<tcp::Loop> tcp::Device::*;
  friend Member reveal(DeviceLoop);
};
struct LoopDescriptor {
  using Member = int tcp::Loop::*;
  friend Member reveal(LoopDescriptor);
};

template struct Reveal<DeviceLoop, &tcp::Device::loop_>;
template struct Reveal<LoopDescriptor, &tcp::Loop::fd_>;

int descriptor_of(const gloo::transport::Device& device) {
  const auto& loop = static_cast<const tcp::Device&>(device).*reveal(DeviceLoop{});
  return loop == nullptr ? -1 : (*loop).*reveal(LoopDescriptor{});
}

std::string bytes(const void* data, size_t size) {
  return std::string(static_cast<const char*>(data), size);
}

// What distinguishes sockets' addresses; empty: none that Gloo uses.
std::string key(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return bytes(&v4.sin_addr, sizeof v4.sin_addr) + bytes(&v4.sin_port, sizeof v4.sin_port);
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    return bytes(&v6.sin6_addr, sizeof v6.sin6_addr) + bytes(&v6.sin6_port, sizeof v6.sin6_port);
  }
  return {};
}

std::vector<int> open_descriptors() {
  std::vector<int> open;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), closedir);
  if (folder == nullptr) return open;
  while (const dirent* entry = readdir(folder.get())) {
    if (entry->d_name[0] != '.') open.push_back(std::atoi(entry->d_name));
  }
  return open;
}

}  // namespace

std::string Descriptors::key_of(const std::vector<char>& address) {
  return key(tcp::Address(address).getSockaddr());
}

bool Descriptors::is_ours(int socket) const {
  for (const auto name : {getsockname, getpeername}) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (name(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
    if (addresses_.count(key(address)) != 0) return true;
  }
  return false;
}

void Descriptors::find(const gloo::transport::Device& device) {
  found_.clear();
  const int own = descriptor_of(device);
  for (int descriptor : open_descriptors()) {
    struct stat status;
    if (descriptor != own && !is_ours(descriptor)) continue;
    if (fstat(descriptor, &status) != 0) continue;
    fcntl(descriptor, F_SETFD, FD_CLOEXEC);
    if (seconds_ > 0 && descriptor != own) keep_alive(descriptor, seconds_);
    found_.push_back({descriptor, status.st_dev, status.st_ino});
  }
}

void Descriptors::close_all() const noexcept {
  for (const Found& found : found_) {
    struct stat status;
    const bool is_open = fstat(found.descriptor, &status) == 0;
    if (is_open && status.st_dev == found.device && status.st_ino == found.inode) {
      close(found.descriptor);
    }
  }
}

}  // namespace fl
