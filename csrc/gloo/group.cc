#include "group.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include "../common/matching.h"
#include "../common/signature.h"

namespace fl {
namespace {

// Collectives come one after the other: they share a queue, which no message has.
constexpr QueueId kCollectives{-1, false, 0};

bool is_message(const fl_signature& signature) {
  return signature.verb == FL_SEND || signature.verb == FL_RECV;
}

// A receive that has to find out who sends, or how much.
bool is_match(const fl_signature& signature, const void* output) {
  return signature.verb == FL_RECV && output != nullptr;
}

QueueId place_of(const fl_message& given) {
  return is_message(given.signature) ? queue_of(given) : kCollectives;
}

// Whether the one rank that is missing has begun the same call: what is it waiting for?
bool waits_in(const Failure& timeout, const fl_signature& call) {
  return timeout.missing.size() == 1 &&
         timeout.seen.calls[timeout.missing[0]].sequence == call.sequence;
}

// What there is to fetch of a message that was only compared is what both have called.
void require_match(const Message& message, Operation& operation) {
  if (message.is_mismatched()) throw Mismatch(message.seen());
  if (!message.is_only_compared()) return;
  operation.seen = message.seen();
  operation.output = make_bytes(0);
}

// Do `work` of `operation`, which waits for peers. What Gloo throws is explained while there still is a
// waiter, which says how long that may take.
template <typename Work>
void with_waiter(Mesh& mesh, Operation& operation, InterruptCheck interrupt, const Work& work) {
  Waiter waiter(mesh, operation.deadline, interrupt, &operation.is_awaited);
  try {
    work(waiter);
  } catch (const Failure&) {
    throw;
  } catch (const Mismatch&) {
    throw;
  } catch (const std::exception& error) {
    throw mesh.explain(-1, error.what());
  }
}

}  // namespace

// The queues that a caller's thread is in.
class Group::Stay {
 public:
  explicit Stay(Queues& queues) : queues_(queues) {}
  ~Stay() {
    for (const QueueId& id : entered_) queues_.leave(id);
  }
  Stay(const Stay&) = delete;

  bool enter(const QueueId& id) {
    if (!queues_.enter(id)) return false;
    entered_.push_back(id);
    return true;
  }

 private:
  Queues& queues_;
  std::vector<QueueId> entered_;
};

Group::Group(int rank, int size, const std::string& host, const std::string& interface,
             double connect_seconds)
    : mesh_(std::make_unique<Mesh>(rank, size, host, interface, connect_seconds)),
      collectives_(*mesh_),
      point_to_point_(*mesh_),
      queues_(*mesh_, mesh_->crew()) {}

Group::Group(const Group& whole, const std::vector<int>& ranks, uint64_t number)
    : mesh_(std::make_unique<Mesh>(*whole.mesh_, ranks, number)),
      collectives_(*mesh_),
      point_to_point_(*mesh_),
      queues_(*mesh_, mesh_->crew()) {
  collectives_.open();
  point_to_point_.open();
}

std::shared_ptr<Operation> Group::connect(std::vector<char> addresses, size_t bytes,
                                          std::vector<char> proofs, bool lazily, double seconds) {
  const auto connect = [this, addresses = std::move(addresses), bytes, proofs = std::move(proofs),
                        lazily](Operation& operation) {
    mesh_->connect(addresses.data(), bytes, proofs.data(), lazily, operation.deadline);
    collectives_.open();
    point_to_point_.open();
  };
  return queues_.submit(kCollectives, seconds, connect);
}

bool Group::is_ahead(int rank, fl_signature& call) {
  Stay stay(queues_);
  return stay.enter(kCollectives) && collectives_.is_ahead(rank, call);
}

std::shared_ptr<Operation> Group::lost() {
  const auto reason = mesh_->reason();
  if (!mesh_->is_broken() && !mesh_->has_farewell() && !reason) return nullptr;
  // That hosts are lost concerns groups beside this one, whichever operation noticed it.
  const bool concerns_others = reason && reason->status == FL_HOST_LOST;
  const bool was_raised = mesh_->is_broken() && !concerns_others;
  const Failure found = was_raised ? mesh_->why_broken() : mesh_->explain(-1, "it gave up");
  auto operation = std::make_shared<Operation>();  // which ends nothing: whoever asks decides
  operation->shared = ended_;
  finish(*operation, found.status, found.what(), found.missing);
  return operation;
}

void Group::give_up(const std::string& why) {
  mesh_->fail(Failure(FL_RAISED, {mesh_->rank}, why));
}

std::shared_ptr<Operation> Group::start(const fl_message& given, void* output, double seconds) {
  if (is_match(given.signature, output)) {
    auto task = match(given, *static_cast<fl_match*>(output), nullptr);
    return queues_.submit(place_of(given), seconds, std::move(task));
  }
  if (is_message(given.signature)) return start_message(given, seconds);
  return queues_.submit(kCollectives, seconds, collective(given, output, nullptr));
}

std::shared_ptr<Operation> Group::run(const fl_message& given, void* output, double seconds) {
  Stay stay(queues_);
  if (!stay.enter(place_of(given))) return start(given, output, seconds);
  if (is_match(given.signature, output)) {
    return run_here(seconds, match(given, *static_cast<fl_match*>(output), interrupt_));
  }
  return run_here(seconds, is_message(given.signature) ? whole_message(given, interrupt_)
                                                       : collective(given, output, interrupt_));
}

std::shared_ptr<Operation> Group::run_here(double seconds, Task task) {
  auto operation = std::make_shared<Operation>();
  operation->shared = ended_;
  operation->seconds = seconds;
  operation->is_awaited = true;  // by the caller
  operation->run = std::move(task);
  execute(*mesh_, *operation);
  const bool nothing_to_fetch = operation->status == FL_OK && operation->output.data == nullptr;
  return nothing_to_fetch ? nullptr : operation;
}

// Where a caller is still inside, the sockets cannot be freed yet, and the others must not wait for
// that.
void Group::close() {
  mesh_->leave();  // and is not the rank that was lost where another one is
  queues_.close();
  if (!queues_.is_idle()) mesh_->fail(Failure(FL_CLOSED, {}, "the group was closed"));
}

// Messages ------------------------------------------------------------------------------------

Group::Task Group::whole_message(const fl_message& message, InterruptCheck interrupt) {
  return [this, message, interrupt](Operation& operation) {
    with_waiter(*mesh_, operation, interrupt, [&](Waiter& waiter) {
      const auto begun = point_to_point_.begin(message);
      end_all({begun}, waiter);
      require_match(*begun, operation);
    });
  };
}

Group::Task Group::match(const fl_message& asked, fl_match& match, InterruptCheck interrupt) {
  return [this, asked, &match, interrupt](Operation& operation) {
    match.source = -1;
    const struct Leave {  // the queue of whoever has sent
      const fl_message& asked;
      const fl_match& match;
      Queues& queues;
      ~Leave() {
        if (asked.peer < 0 && match.source >= 0) {
          queues.leave({match.source, false, asked.signature.root});
        }
      }
    } leave{asked, match, queues_};
    with_waiter(*mesh_, operation, interrupt, [&](Waiter& waiter) {
      const auto begun = point_to_point_.begin_match(asked, match, queues_, waiter);
      if (begun == nullptr) return;
      end_all({begun}, waiter);
      require_match(*begun, operation);
    });
  };
}

// What needs no waiting happens at once, the rest on a thread of the group's own.
std::shared_ptr<Operation> Group::start_message(const fl_message& message, double seconds) {
  const QueueId id = queue_of(message);
  if (!mesh_->is_connected(message.peer) || !queues_.enter(id)) {
    return queues_.submit(id, seconds, whole_message(message, nullptr));
  }
  std::shared_ptr<Message> begun;
  std::exception_ptr error;
  try {
    begun = point_to_point_.begin(message);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  return queues_.go_on(id, seconds, [this, begun, error](Operation& operation) {
    with_waiter(*mesh_, operation, nullptr, [&](Waiter& waiter) {
      if (error) std::rethrow_exception(error);
      end_all({begun}, waiter);
      require_match(*begun, operation);
    });
  });
}

std::vector<std::shared_ptr<Operation>> Group::exchange(const fl_message* messages, int count,
                                                        double seconds) {
  std::vector<std::shared_ptr<Operation>> results(count);
  std::vector<int> here;  // the others must wait for earlier ones
  Stay stay(queues_);
  for (int i = 0; i < count; ++i) {
    if (stay.enter(queue_of(messages[i]))) {
      here.push_back(i);
    } else {
      results[i] = start_message(messages[i], seconds);
    }
  }
  Messages begun;
  const auto failed = run_here(seconds, [&](Operation& operation) {
    with_waiter(*mesh_, operation, interrupt_, [&](Waiter& waiter) {
      for (int i : here) mesh_->reach({messages[i].peer});
      for (int i : here) begun.push_back(point_to_point_.begin(messages[i]));
      end_all(begun, waiter);
    });
  });
  for (size_t i = 0; i < here.size(); ++i) {
    if (i >= begun.size() || !begun[i]->has_ended()) {
      results[here[i]] = failed;
    } else if (begun[i]->is_mismatched() || begun[i]->is_only_compared()) {
      const auto report = [&](Operation& operation) { require_match(*begun[i], operation); };
      results[here[i]] = run_here(seconds, report);
    }
  }
  return results;
}

// Collectives ---------------------------------------------------------------------------------

Group::Task Group::collective(const fl_message& given, void* output, InterruptCheck interrupt) {
  return [this, given = given, output, interrupt](Operation& operation) mutable {
    given.signature.sequence = sequence_of(++calls_);
    with_waiter(*mesh_, operation, interrupt, [&](Waiter& waiter) {
      Call call{given.signature, given.site, operation.seen, waiter};
      try {
        operation.output = dispatch(call, given.data, output);
      } catch (Failure& failure) {
        if (failure.status == FL_TIMEOUT) {
          failure.seen = collectives_.last_calls();
          failure.seen.calls[mesh_->rank] = given.signature;
          if (waits_in(failure, given.signature)) failure.missing = mesh_->cause_of(failure);
        }
        throw;
      }
    });
  };
}

Bytes Group::dispatch(Call& call, void* data, void* output) {
  if (!is_compared(call.mine)) return do_verb(collectives_, call, data, output);
  collectives_.barrier(call);
  return shapes_are_wanted(call.mine.verb) ? make_bytes(0) : Bytes{};
}

}  // namespace fl
