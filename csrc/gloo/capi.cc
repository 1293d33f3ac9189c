// The C ABI: every exception becomes a status and a message.
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
                         double seconds, char* message, size_t message_bytes) {
  try {
    return new fl_group{{rank, size, host, interface, seconds}};
  } catch (const std::exception& error) {
    fl::copy_message(error.what(), message, message_bytes);
    return nullptr;
  }
}

fl_group* fl_gloo_part(fl_group* group, const int* ranks, int size, uint64_t number) {
  return new fl_group{{group->group, {ranks, ranks + size}, number}};
}

int fl_gloo_address(fl_group* group, char* address, size_t address_bytes) {
  const auto& bytes = group->group.address();
  if (bytes.size() > address_bytes) return -1;
  std::copy(bytes.begin(), bytes.end(), address);
  return static_cast<int>(bytes.size());
}

int fl_gloo_listen_for_hosts(fl_group* group, char* message, size_t message_bytes) {
  try {
    return group->group.listen_for_hosts();
  } catch (const std::exception& error) {
    fl::copy_message(error.what(), message, message_bytes);
    return -1;
  }
}

void fl_gloo_watch_hosts(fl_group* group, const fl_hosts* hosts, const char* addresses,
                         size_t address_bytes, const char* key) {
  group->group.watch_hosts(
      fl::read_hosts(*hosts, group->group.size(), addresses, address_bytes, key));
}

void fl_gloo_take_along(fl_group* group, void (*give_up)(void* other, const char* why),
                        void* other, const char* advice) {
  group->group.take_along({give_up, other, advice});
}

fl_op* fl_gloo_connect(fl_group* group, const char* addresses, size_t address_bytes,
                       const char* key, int lazily, double seconds) {
  return fl::handle([&] {
    const size_t size = group->group.size();
    return group->group.connect({addresses, addresses + size * address_bytes}, address_bytes,
                                {key, FL_KEY_BYTES}, lazily != 0, seconds);
  });
}

void fl_gloo_check_at_once(fl_group* group) { group->group.check_at_once(); }

int fl_gloo_awaited(fl_group* group) { return group->group.awaited(); }

void fl_gloo_call_ranks(fl_group* group, const int* numbers) {
  group->group.call_ranks({numbers, numbers + group->group.size()});
}

int fl_gloo_is_ahead(fl_group* group, int rank, fl_signature* call) {
  return group->group.is_ahead(rank, *call) ? 1 : 0;
}

fl_op* fl_gloo_lost(fl_group* group) {
  return fl::handle([&] { return group->group.lost(); });
}

void fl_gloo_give_up(fl_group* group, const char* why) { group->group.give_up(why); }

void fl_gloo_on_interrupt(fl_group* group, int (*check)(void)) {
  group->group.on_interrupt(check);
}

fl_op* fl_gloo_run(fl_group* group, const fl_signature* signature, void* data, void* output,
                   int peer, double seconds, int async, const fl_site* site) {
  const fl_message given{*signature, data, peer, site != nullptr ? *site : fl_site{}, nullptr};
  return fl::handle([&] {
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

void fl_gloo_leave(fl_group* group) { group->group.leave(); }

void fl_gloo_close(fl_group* group) { group->group.close(); }

// A child that was forked has the memory of the group, but none of its threads.
void fl_gloo_free(fl_group* group) {
  if (group->owner == getpid()) delete group;
}

void fl_gloo_abandon(fl_group* group) { group->group.abandon(); }

}  // extern "C"
