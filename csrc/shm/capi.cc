// The C ABI. ../common/capi.h converts exceptions into status codes.
#include "../common/capi.h"

#include "abi.h"
#include "group.h"

struct fl_group {
  fl::ShmGroup group;
  const pid_t owner = getpid();
};

struct fl_posted {
  int count;
  fl::ShmGroup* group;
  fl::Port::Posted messages;
  std::exception_ptr error;  // error of a failed fl_post(); set only in `not_posted`
};

struct fl_region {
  std::shared_ptr<fl::Mapping> mapping;
  void* array;
};

namespace {

thread_local fl_posted not_posted;  // allocated in advance, because fl_post() may fail for lack of memory

fl::Mapping map(const char* path, bool create, size_t bytes, bool reserve) {
  return create ? fl::Mapping::create(path, bytes, reserve) : fl::Mapping::open(path, bytes);
}

// Map a group's segment. Close an unnamed file, because many groups would use many descriptors.
fl::Mapping map_segment(const char* path, int create, int is_named, int size, bool has_channels) {
  fl::Mapping mapping = map(path, create != 0, fl::Segment::bytes_for(size, has_channels), is_named != 0);
  if (is_named == 0) mapping.close_file();
  return mapping;
}

}  // namespace

#include "../common/group.inc"

extern "C" {

size_t fl_shm_bytes(int ranks) { return fl::Segment::bytes_for(ranks); }

fl_group* fl_shm_open(const char* path, int create, int is_named, int rank, int size) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    return new fl_group{{map_segment(path, create, is_named, size, true), rank, size}};
  });
}

fl_group* fl_shm_part(fl_group* whole, const int* ranks, unsigned number, const char* path, int create,
                      int is_named, int rank, int size) {
  return fl::guarded<fl_group*>(nullptr, [&] {
    fl::Mapping mapping = map_segment(path, create, is_named, size, false);
    return new fl_group{{whole->group, std::move(mapping), rank, {ranks, ranks + size}, number}};
  });
}

fl_posted* fl_post(fl_group* group, const fl_message* messages, int count, double seconds, int spins) {
  try {
    auto room = std::make_unique<fl_posted>();
    auto posted = group->group.post(messages, count, seconds, spins);
    if (posted.empty()) return nullptr;
    *room = {count, &group->group, std::move(posted), nullptr};
    return room.release();
  } catch (...) {
    not_posted.count = count;
    not_posted.error = std::current_exception();
    return &not_posted;
  }
}

void fl_deliver(fl_posted* posted, fl_op** results) {
  fl::handles(results, posted->count, [&] {
    if (posted == &not_posted) std::rethrow_exception(std::exchange(posted->error, nullptr));
    const std::unique_ptr<fl_posted> owned(posted);
    return posted->group->deliver(posted->messages);
  });
}

int fl_begin(fl_group* group, const fl_signature* signature, const void* data, double seconds, const fl_site* site) {
  return fl::guarded(0, [&] { return group->group.begin(*signature, data, seconds, site) ? 1 : 0; });
}

int fl_ready(fl_group* group, int spins) {
  return fl::guarded<int>(FL_COMPLETE, [&] { return static_cast<int>(group->group.ready(spins)); });
}

fl_op* fl_finish(fl_group* group, const fl_signature* signature, void* data, void* output) {
  return fl::handle([&] { return group->group.finish(*signature, data, output); });
}

fl_op* fl_look_back(fl_group* group, double seconds, int* is_behind) {
  return fl::handle([&] {
    bool behind = false;
    auto result = group->group.look_back(seconds, behind);
    *is_behind = behind ? 1 : 0;
    return result;
  });
}

fl_region* fl_add_region(fl_group* group, const char* path, int create, size_t bytes) {
  return fl::guarded<fl_region*>(nullptr, [&] {
    const auto mapping = std::make_shared<fl::Mapping>(
        map(path, create != 0, bytes * group->group.size(), create == 1));
    mapping->close_file();  // many regions would use many descriptors
    return new fl_region{mapping, group->group.add_region(mapping, bytes)};
  });
}

void* fl_region_array(fl_region* region) { return region->array; }

void fl_free_region(fl_region* region) { delete region; }

int fl_drop_region(fl_group* group, void* array) {
  return fl::guarded(0, [&] { return group->group.drop_region(array) ? 1 : 0; });
}

int fl_on_mismatch(fl_group* group, void (*function)(fl_site*)) {
  return fl::done([&] { group->group.on_mismatch(function); });
}

}  // extern "C"
