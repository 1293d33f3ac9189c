// The C ABI; see ../common/capi.h for what becomes of exceptions.
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../common/capi.h"
#include "group.h"

struct fl_group {
  fl::Group group;
  const pid_t owner = getpid();
};

extern "C" {

fl_group* fl_gloo_create(int rank, int size, const char* host, const char* interface,
                         double seconds) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    return new fl_group{{rank, size, host, interface, seconds}};
  });
}

fl_group* fl_gloo_part(fl_group* group, const int* ranks, int size, uint64_t number) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    return new fl_group{{group->group, {ranks, ranks + size}, number}};
  });
}

int fl_gloo_address(fl_group* group, char* address, size_t address_bytes) {
  return fl::guarded(-1, [&] {
    const auto& bytes = group->group.address();
    if (bytes.size() > address_bytes) return -1;
    std::copy(bytes.begin(), bytes.end(), address);
    return static_cast<int>(bytes.size());
  });
}

int fl_gloo_listen_for_hosts(fl_group* group) {
  return fl::guarded(-1, [&] { return group->group.listen_for_hosts(); });
}

int fl_gloo_watch_hosts(fl_group* group, const fl_hosts* hosts, const char* addresses,
                        size_t address_bytes, const char* key) {
  return fl::done([&] {
    const size_t size = group->group.size();
    group->group.watch_hosts(fl::read_hosts(*hosts, size, addresses, address_bytes, key));
  });
}

int fl_gloo_take_along(fl_group* group, int (*give_up)(void* other, const char* why), void* other,
                       const char* advice) {
  return fl::done([&] { group->group.take_along({give_up, other, advice}); });
}

fl_op* fl_gloo_connect(fl_group* group, const char* addresses, size_t address_bytes,
                       const char* key, int lazily, double seconds) {
  return fl::handle([&] {
    const size_t size = group->group.size();
    return group->group.connect({addresses, addresses + size * address_bytes}, address_bytes,
                                {key, FL_KEY_BYTES}, lazily != 0, seconds);
  });
}

int fl_gloo_check_at_once(fl_group* group) {
  return fl::done([&] { group->group.check_at_once(); });
}

int fl_gloo_awaited(fl_group* group) {
  return fl::guarded(-1, [&] { return group->group.awaited(); });
}

int fl_gloo_call_ranks(fl_group* group, const int* numbers) {
  return fl::done([&] { group->group.call_ranks({numbers, numbers + group->group.size()}); });
}

int fl_gloo_is_ahead(fl_group* group, int rank, fl_signature* call) {
  return fl::guarded(-1, [&] { return group->group.is_ahead(rank, *call) ? 1 : 0; });
}

fl_op* fl_gloo_lost(fl_group* group) {
  return fl::handle([&] { return group->group.lost(); });
}

int fl_gloo_give_up(fl_group* group, const char* why) {
  return fl::done([&] { group->group.give_up(why); });
}

int fl_gloo_on_interrupt(fl_group* group, int (*check)(void)) {
  return fl::done([&] { group->group.on_interrupt(check); });
}

fl_op* fl_gloo_run(fl_group* group, const fl_signature* signature, void* data, void* output,
                   int peer, double seconds, int async, const fl_site* site) {
  return fl::handle([&] {
    const fl_message given{*signature, data, peer, site != nullptr ? *site : fl_site{}, nullptr};
    return async != 0 ? group->group.start(given, output, seconds)
                      : group->group.run(given, output, seconds);
  });
}

void fl_gloo_exchange(fl_group* group, const fl_message* messages, int count, double seconds,
                      int async, fl_op** results) {
  fl::handles(results, count, [&] {
    fl::Group& ranks = group->group;
    return async != 0 ? ranks.start_exchange(messages, count, seconds)
                      : ranks.exchange(messages, count, seconds);
  });
}

int fl_gloo_leave(fl_group* group) {
  return fl::done([&] { group->group.leave(); });
}

int fl_gloo_close(fl_group* group) {
  return fl::done([&] { group->group.close(); });
}

// A child that was forked has the memory of the group, but none of its threads.
void fl_gloo_free(fl_group* group) {
  if (group->owner == getpid()) delete group;
}

int fl_gloo_abandon(fl_group* group) {
  return fl::done([&] { group->group.abandon(); });
}

}  // extern "C"
