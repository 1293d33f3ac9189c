// The C ABI. ../common/capi.h converts exceptions into status codes.
#include "../common/capi.h"

#include "group.h"

struct fl_group {
  fl::Group group;
  const pid_t owner = getpid();
};

#include "../common/group.inc"

extern "C" {

fl_group* fl_gloo_create(int rank, int size, const char* host, const char* interface, double seconds) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    return new fl_group{fl::Group(std::make_unique<fl::Mesh>(rank, size, host, interface, seconds))};
  });
}

fl_group* fl_gloo_part(fl_group* group, const int* ranks, int size, uint64_t number) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    const std::vector<int> members(ranks, ranks + size);
    return new fl_group{fl::Group(std::make_unique<fl::Mesh>(group->group.mesh(), members, number))};
  });
}

int fl_address(fl_group* group, char* address, size_t address_bytes) {
  return fl::guarded(-1, [&] {
    const auto& bytes = group->group.mesh().family->links->address();
    if (bytes.size() > address_bytes) return -1;
    std::copy(bytes.begin(), bytes.end(), address);
    return static_cast<int>(bytes.size());
  });
}

int fl_listen_for_hosts(fl_group* group) {
  return fl::guarded(-1, [&] { return group->group.mesh().family->listen_for_hosts(); });
}

int fl_watch_hosts(fl_group* group, const fl_hosts* hosts, const char* addresses, size_t address_bytes,
                   const char* key) {
  return fl::done([&] {
    const int size = group->group.size();
    group->group.mesh().family->watch_hosts(fl::read_hosts(*hosts, size, addresses, address_bytes, key));
  });
}

int fl_sum_by_hosts(fl_group* group, const int* numbers) {
  return fl::done([&] { group->group.sum_by_hosts({numbers, numbers + group->group.size()}); });
}

int fl_take_along(fl_group* group, int (*give_up)(void* other, const char* why), void* other, const char* advice) {
  return fl::done([&] { group->group.mesh().take_along({give_up, other, advice}); });
}

fl_op* fl_connect(fl_group* group, const char* addresses, size_t address_bytes, const char* key, int lazily,
                  double seconds) {
  return fl::handle([&] {
    const size_t size = group->group.size();
    return group->group.connect({addresses, addresses + size * address_bytes}, address_bytes,
                                {key, FL_KEY_BYTES}, lazily != 0, seconds);
  });
}

int fl_awaited(fl_group* group) {
  return fl::guarded(-1, [&] { return group->group.mesh().awaited(); });
}

}  // extern "C"
