#include "script.h"

#include <cstring>
#include <deque>

#include "../../csrc/common/capi.h"
#include "check.h"
#include "reference.h"

namespace stress {
namespace {

constexpr char kUntouched = 0x5a;

bool is_reduction(int verb) {
  return verb == FL_ALL_REDUCE || verb == FL_REDUCE || verb == FL_REDUCE_SCATTER;
}

// One call of one rank: its memory, until it has ended and was compared.
class Running {
 public:
  Running(fl::ShmGroup& group, const Step& step, int rank, size_t number, char* in_region)
      : group_(group), step_(step), rank_(rank), number_(number), data_(in_region) {
    if (step.data != nullptr && data_ == nullptr) {
      own_.reset(new char[step.offset + step.data->size()]);  // ends with the allocation
      data_ = own_.get() + step.offset;
    }
    if (step.data != nullptr) copy(data_, *step.data);
    output_.reset(new char[step.output_bytes]);
    std::memset(output_.get(), kUntouched, step.output_bytes);
    call();
  }

  // Wait for what was started, and compare.
  void end() {
    fl_status status = FL_OK;
    if (handle_.operation != nullptr) {
      do {
        status = fl_op_wait(&handle_, 1.0);
      } while (status == FL_PENDING);
    }
    if (status != step_.status) {
      report("status " + std::to_string(status) + " instead of " + std::to_string(step_.status) +
             ", \"" + fl_op_message(&handle_) + "\"");
    }
    compare(step_.data_after != nullptr ? step_.data_after : step_.data, data_, "data");
    if (status == FL_MISMATCH) return compare_signatures();
    if (step_.output_after == nullptr) return;
    size_t bytes = step_.output_bytes;
    const char* output = output_.get();
    if (step_.gathers) {
      if (handle_.operation == nullptr) report("nothing was gathered");
      output = static_cast<const char*>(fl_op_output(&handle_, &bytes));
    }
    if (bytes != step_.output_after->size())
      report("output of " + std::to_string(bytes) + " bytes");
    compare(step_.output_after, output, "output");
  }

 private:
  void call() {
    const fl_signature& s = step_.signature;
    void* output = step_.gathers ? nullptr : output_.get();
    const auto started = [&] { return group_.start(s, data_, output, step_.peer, kForever); };
    const auto run = [&] { return group_.run(s, data_, output, step_.peer, kForever); };
    switch (step_.how) {
      case How::kStart:
        handle_.operation = started();
        break;
      case How::kRun:
        handle_.operation = run();
        break;
      case How::kInTwoSteps:
        if (group_.begin(s, data_, kForever)) {
          group_.ready(static_cast<int>(number_ % 3) * 50);
          handle_.operation = group_.finish(s, data_);
        } else {
          handle_.operation = run();
        }
    }
  }

  static void copy(char* to, const std::vector<char>& from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }

  void compare(const Block& wanted, const char* got, const char* what) {
    if (wanted == nullptr || wanted->empty()) return;
    const fl_signature& s = step_.signature;
    if (is_reduction(s.verb) && step_.status == FL_OK) {
      const std::string wrong =
          difference(s.dtype, got, wanted->data(), wanted->size() / s.itemsize, true);
      if (!wrong.empty()) report(std::string(what) + ": " + wrong);
    } else if (std::memcmp(got, wanted->data(), wanted->size()) != 0) {
      size_t at = 0;
      while (got[at] == (*wanted)[at]) ++at;
      report(std::string(what) + " differ from byte " + std::to_string(at) + " on");
    }
  }

  void compare_signatures() {
    for (size_t i = 0; i < step_.output_bytes; ++i) {
      if (output_[i] != kUntouched) report("a mismatch has written output");
    }
    const fl_signature* seen = fl_op_signatures(&handle_);
    for (size_t r = 0; r < step_.seen.size(); ++r) {
      if (step_.seen[r].sequence == 0) continue;
      fl_signature theirs = seen[r];
      if (theirs.sequence == 0)
        report("the signature of rank " + std::to_string(r) + " is missing");
      theirs.sequence = step_.seen[r].sequence;
      if (std::memcmp(&theirs, &step_.seen[r], sizeof theirs) != 0) {
        report("rank " + std::to_string(r) + " is said to have called " + describe(theirs) +
               " instead of " + describe(step_.seen[r]));
      }
    }
  }

  [[noreturn]] void report(const std::string& what) {
    fail("rank " + std::to_string(rank_) + ", step " + std::to_string(number_) + ", " +
         describe(step_.signature) + (step_.region >= 0 ? ", in a region" : "") +
         (step_.how == How::kStart ? ", started" : "") + ": " + what);
  }

  fl::ShmGroup& group_;
  const Step& step_;
  const int rank_;
  const size_t number_;
  std::unique_ptr<char[]> own_, output_;
  char* data_;
  fl_op handle_;
};

}  // namespace

std::string describe(const fl_signature& s) {
  return "verb " + std::to_string(s.verb) + " of " + std::to_string(s.count) + " " +
         info_of(s.dtype).name + ", op " + std::to_string(s.op) + ", root " +
         std::to_string(s.root) + ", scale " + std::to_string(s.scale);
}

void play(fl::ShmGroup& group, World& world, int rank, const std::vector<Step>& steps) {
  std::deque<Running> running;
  std::vector<char*> arrays(world.regions.size());
  const auto end_all = [&] {
    for (Running& one : running) one.end();
    running.clear();
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    if (step.adds >= 0) {
      auto& mapping = world.regions[step.adds][rank];
      arrays[step.adds] =
          static_cast<char*>(group.add_region(std::move(mapping), world.strides[step.adds]));
      continue;
    }
    if (step.drops >= 0 || step.region >= 0) end_all();
    if (step.drops >= 0) {
      group.drop_region(arrays[step.drops]);
      continue;
    }
    running.emplace_back(group, step, rank, i,
                         step.region >= 0 ? arrays[step.region] + step.offset : nullptr);
    if (step.how != How::kStart || step.wait || step.region >= 0) end_all();
  }
  end_all();
}

}  // namespace stress
