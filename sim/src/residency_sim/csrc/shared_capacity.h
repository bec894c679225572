// One capacity for several processes: a small file that names who holds how many bytes. It knows
// nothing of torch or of the allocator.
//
// [Note: who is alive] The file holds a table with one slot a process, but what a slot says counts
// only while its process holds the kernel's lock on the slot's bytes (POSIX record locks). The
// kernel drops that lock when the process ends, however it ends, does not hand it to a forked
// child, and cannot mistake a reused process number for the old one. So a crash leaves nothing
// to tidy up, and what a dead process left in the table has no owner. Changes are made under a
// further such lock, on the file's first byte, which a dead holder also gives up.
//
// A record lock is lost when its process closes *any* descriptor of the file: nothing else here may
// open a file that is joined.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace sim {

// What was asked for does not fit what the other processes have; nothing was changed.
struct ShareRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The file cannot be used.
struct ShareUnusable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class SharedCapacity {
 public:
  struct Holder {
    pid_t pid;
    size_t num_bytes;
  };
  struct Figures {
    size_t capacity_bytes = 0;
    size_t free_bytes = 0;
    std::vector<Holder> others;  // those with bytes, by slot
  };

  // Takes part in the device `name`, with `held_bytes` already reserved here, and leaves the one
  // taken part in before. Joining the same one again changes its capacity. Throws ShareRefused or
  // ShareUnusable, and has then changed nothing.
  void join(const std::string& folder, const std::string& name, size_t capacity_bytes,
            size_t held_bytes);
  // Gives all bytes back; the last one out removes the file.
  void leave() noexcept;

  bool is_joined() const { return is_joined_; }
  // A forked child has its parent's memory, but no share of its own until it joins.
  bool is_inherited() const;
  void refuse_if_inherited() const;

  bool reserve(size_t num_bytes);  // false when there is no room
  void release(size_t num_bytes) noexcept;
  Figures figures();

 private:
  void change_capacity(size_t capacity_bytes);

  std::mutex lock_;  // record locks do not keep the threads of one process apart
  std::atomic<bool> is_joined_ = false;
  std::string path_;
  std::string name_;
  int file_ = -1;
  int slot_ = -1;
  int num_forks_ = 0;  // as of the join
};

}  // namespace sim
