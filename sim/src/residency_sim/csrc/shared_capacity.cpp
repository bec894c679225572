#include "shared_capacity.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace sim {
namespace {

constexpr int kNumSlots = 255;
constexpr uint64_t kMagic = 0x726573696d000001;  // "resim", and the version of the layout

}  // namespace

struct ShareTable {
  struct Slot {
    int64_t pid = 0;  // 0: no process's
    uint64_t num_bytes = 0;
  };
  uint64_t magic = kMagic;
  uint64_t capacity_bytes = 0;
  Slot slots[kNumSlots];

  size_t used_bytes() const {
    size_t sum = 0;
    for (const Slot& slot : slots) sum += slot.pid ? slot.num_bytes : 0;
    return sum;
  }
  size_t free_bytes() const {
    const size_t used = used_bytes();
    return used < capacity_bytes ? capacity_bytes - used : 0;
  }
};

namespace {

// ------------------------------------------------------------------------------------------ forks

std::atomic<int> num_forks = 0;  // between the first process that joined and this one

void count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks++; });
  (void)registered;
}

// ------------------------------------------------------------------------------- locks of the file

constexpr off_t kFirstSlot = offsetof(ShareTable, slots);

off_t slot_offset(int slot) {
  return kFirstSlot + static_cast<off_t>(slot * sizeof(ShareTable::Slot));
}

[[noreturn]] void fail(const std::string& what) {
  throw ShareUnusable(what + ": " + std::strerror(errno) + ".");
}

// `num_bytes` of 0 reaches to the end of the file and beyond.
bool set_lock(int file, int command, short type, off_t begin, off_t num_bytes) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = begin;
  lock.l_len = num_bytes;
  int result;
  do {
    result = fcntl(file, command, &lock);
  } while (result < 0 && errno == EINTR);
  return result == 0;
}

bool lock_slot(int file, int slot) {
  return set_lock(file, F_SETLK, F_WRLCK, slot_offset(slot), sizeof(ShareTable::Slot));
}

void unlock_slot(int file, int slot) {
  set_lock(file, F_SETLK, F_UNLCK, slot_offset(slot), sizeof(ShareTable::Slot));
}

// Where the kernel does not answer, the others count as alive.
bool is_locked_by_another(int file, off_t begin, off_t num_bytes) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = begin;
  lock.l_len = num_bytes;
  return fcntl(file, F_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

bool has_others(int file) { return is_locked_by_another(file, kFirstSlot, 0); }

// While it lives, no other process changes the file.
class Exclusive {
 public:
  explicit Exclusive(int file) : file_(file), is_held_(set_lock(file, F_SETLKW, F_WRLCK, 0, 1)) {}
  ~Exclusive() {
    if (is_held_) set_lock(file_, F_SETLK, F_UNLCK, 0, 1);
  }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;
  bool is_held() const { return is_held_; }
  void demand() const {
    if (!is_held_) fail("The file of the shared capacity cannot be locked");
  }

 private:
  int file_;
  bool is_held_;
};

// --------------------------------------------------------------------------------------- the table

ShareTable read_table(int file) {
  ShareTable table;
  if (pread(file, &table, sizeof(table), 0) != sizeof(table)) {
    throw ShareUnusable("The file of the shared capacity was cut short by someone else.");
  }
  return table;
}

bool write_table(int file, const ShareTable& table) noexcept {
  return pwrite(file, &table, sizeof(table), 0) == sizeof(table);
}

bool write_slot(int file, const ShareTable& table, int slot) noexcept {
  constexpr ssize_t kSize = sizeof(ShareTable::Slot);
  return pwrite(file, &table.slots[slot], kSize, slot_offset(slot)) == kSize;
}

// Clears the slots whose process has ended; `own` is not asked for, as only this process locks it.
void clear_dead_slots(int file, ShareTable& table, int own) {
  for (int slot = 0; slot < kNumSlots; slot++) {
    if (slot == own || table.slots[slot].pid == 0) continue;
    if (is_locked_by_another(file, slot_offset(slot), sizeof(ShareTable::Slot))) continue;
    table.slots[slot] = {};
    write_slot(file, table, slot);
  }
}

// ---------------------------------------------------------------------------------------- messages

std::string format_bytes(size_t num_bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (num_bytes < 1024) return std::to_string(num_bytes) + " B";
  double amount = static_cast<double>(num_bytes) / 1024;
  int unit = 0;
  for (; amount >= 1024 && unit < 3; unit++) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f %s", amount, kUnits[unit]);
  return text;
}

std::string device_of(const std::string& name) {
  return "the device that share='" + name + "' names";
}

[[noreturn]] void refuse_capacity(const std::string& name, size_t asked, const ShareTable& table) {
  throw ShareRefused("capacity is " + format_bytes(asked) + ", and " + device_of(name) + " has " +
                     format_bytes(table.capacity_bytes) +
                     ", by the processes that use it already. Give the same capacity or another "
                     "name; a process that is alone may change it.");
}

// ----------------------------------------------------------------------------------------- the
// file

std::string file_prefix() { return "residency-sim-" + std::to_string(geteuid()) + "-"; }

// A descriptor that is closed unless it is released.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() { reset(-1); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }
  void reset(int descriptor) {
    const int previous = std::exchange(descriptor_, descriptor);
    if (previous >= 0) close(previous);
  }

 private:
  int descriptor_;
};

bool is_removed(int file) {
  struct stat status;
  return fstat(file, &status) == 0 && status.st_nlink == 0;
}

void check_owner(int file, const std::string& path) {
  struct stat status;
  if (fstat(file, &status) != 0) fail("The file " + path + " cannot be used");
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
    throw ShareUnusable("The file " + path + " is not a plain file of this user.");
  }
}

// Without other processes, what the file says is void: it is new, or was left by a crash.
ShareTable table_to_join(int file, const std::string& name, size_t capacity_bytes) {
  if (!has_others(file)) {
    ShareTable table;
    table.capacity_bytes = capacity_bytes;
    return table;
  }
  ShareTable table = read_table(file);
  if (table.magic != kMagic) {
    throw ShareRefused("share is '" + name +
                       "', and another version of residency uses that name; take another one.");
  }
  if (table.capacity_bytes != capacity_bytes) refuse_capacity(name, capacity_bytes, table);
  clear_dead_slots(file, table, -1);
  return table;
}

int take_slot_in(ShareTable& table, int file, const std::string& name, size_t held_bytes) {
  const size_t free_bytes = table.free_bytes();
  if (held_bytes > free_bytes) {
    throw ShareRefused(format_bytes(held_bytes) + " are in use here, and " + device_of(name) +
                       " has " + format_bytes(free_bytes) + " left; free tensors first.");
  }
  for (int slot = 0; slot < kNumSlots; slot++) {
    if (table.slots[slot].pid != 0 || !lock_slot(file, slot)) continue;
    table.slots[slot] = {getpid(), held_bytes};
    if (!write_table(file, table)) fail("The file of the shared capacity cannot be written");
    return slot;
  }
  throw ShareUnusable("More than " + std::to_string(kNumSlots) + " processes use " +
                      device_of(name) + ".");
}

// Closing the file undoes what a failure leaves; only a file without an owner must go.
int take_slot(int file, const std::string& path, const std::string& name, size_t capacity_bytes,
              size_t held_bytes) {
  try {
    ShareTable table = table_to_join(file, name, capacity_bytes);
    return take_slot_in(table, file, name, held_bytes);
  } catch (...) {
    if (!has_others(file)) unlink(path.c_str());
    throw;
  }
}

// Removes files of this user that processes which were killed left behind.
void remove_abandoned_files(const std::string& folder, const std::string& joined) {
  DIR* entries = opendir(folder.c_str());
  if (!entries) return;
  while (const dirent* entry = readdir(entries)) {
    const std::string path = folder + "/" + entry->d_name;
    if (std::string(entry->d_name).rfind(file_prefix(), 0) != 0 || path == joined) continue;
    const File file(open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    // One that is busy is in use; the lock on all of it goes with the descriptor.
    if (file.get() >= 0 && set_lock(file.get(), F_SETLK, F_WRLCK, 0, 0)) unlink(path.c_str());
  }
  closedir(entries);
}

}  // namespace

// --------------------------------------------------------------------------------- joining,
// leaving

bool SharedCapacity::is_inherited() const { return is_joined_ && num_forks_ != num_forks; }

void SharedCapacity::refuse_if_inherited() const {
  if (!is_inherited()) return;
  throw std::runtime_error(
      "The simulated accelerator shares its capacity with other processes, and this process was "
      "forked from one that uses it. Start processes with 'spawn', as for CUDA.");
}

void SharedCapacity::join(const std::string& folder, const std::string& name, size_t capacity_bytes,
                          size_t held_bytes) {
  count_forks();
  const std::string path = folder + "/" + file_prefix() + name;
  if (is_joined_ && !is_inherited() && path == path_) return change_capacity(capacity_bytes);
  File file(-1);
  int slot = -1;
  while (slot < 0) {
    file.reset(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) fail("The file " + path + " cannot be made or opened");
    check_owner(file.get(), path);
    Exclusive exclusive(file.get());
    exclusive.demand();
    if (is_removed(file.get())) continue;  // by the last one out, before this one came in
    slot = take_slot(file.get(), path, name, capacity_bytes, held_bytes);
  }
  leave();
  {
    std::lock_guard<std::mutex> guard(lock_);
    path_ = path;
    name_ = name;
    file_ = file.release();
    slot_ = slot;
    num_forks_ = num_forks;
    is_joined_ = true;
  }
  remove_abandoned_files(folder, path);
}

void SharedCapacity::change_capacity(size_t capacity_bytes) {
  std::lock_guard<std::mutex> guard(lock_);
  const Exclusive exclusive(file_);
  exclusive.demand();
  ShareTable table = read_table(file_);
  if (table.capacity_bytes == capacity_bytes) return;
  if (has_others(file_)) refuse_capacity(name_, capacity_bytes, table);
  clear_dead_slots(file_, table, slot_);
  table.capacity_bytes = capacity_bytes;
  if (!write_table(file_, table)) fail("The file of the shared capacity cannot be written");
}

void SharedCapacity::leave() noexcept {
  if (!is_joined_) return;
  if (is_inherited()) {  // the slot is the parent's, and a thread that is not here may hold the
                         // lock
    close(file_);
    is_joined_ = false;
    return;
  }
  std::lock_guard<std::mutex> guard(lock_);
  if (!is_joined_) return;
  {
    const Exclusive exclusive(file_);
    write_slot(file_, ShareTable(), slot_);
    unlock_slot(file_, slot_);
    // One that comes in now waits for the lock, finds the file removed, and makes another.
    if (exclusive.is_held() && !has_others(file_)) unlink(path_.c_str());
  }
  close(file_);
  is_joined_ = false;
}

// ------------------------------------------------------------------------------------------- bytes

bool SharedCapacity::reserve(size_t num_bytes) {
  refuse_if_inherited();
  std::lock_guard<std::mutex> guard(lock_);
  if (!is_joined_) return true;  // the process is ending, and another thread has left
  const Exclusive exclusive(file_);
  exclusive.demand();
  ShareTable table = read_table(file_);
  if (num_bytes > table.free_bytes()) clear_dead_slots(file_, table, slot_);
  if (num_bytes > table.free_bytes()) return false;
  table.slots[slot_].num_bytes += num_bytes;
  if (!write_slot(file_, table, slot_)) fail("The file of the shared capacity cannot be written");
  return true;
}

void SharedCapacity::release(size_t num_bytes) noexcept {
  if (!is_joined_ || is_inherited()) return;
  std::lock_guard<std::mutex> guard(lock_);
  if (!is_joined_) return;
  const Exclusive exclusive(file_);
  ShareTable table;
  if (pread(file_, &table, sizeof(table), 0) != sizeof(table)) return;
  table.slots[slot_].num_bytes -= num_bytes;
  write_slot(file_, table, slot_);
}

SharedCapacity::Figures SharedCapacity::figures() {
  refuse_if_inherited();
  std::lock_guard<std::mutex> guard(lock_);
  if (!is_joined_) return {};
  const Exclusive exclusive(file_);
  exclusive.demand();
  ShareTable table = read_table(file_);
  clear_dead_slots(file_, table, slot_);
  Figures figures{table.capacity_bytes, table.free_bytes(), {}};
  for (int slot = 0; slot < kNumSlots; slot++) {
    const ShareTable::Slot& holder = table.slots[slot];
    if (slot == slot_ || holder.num_bytes == 0) continue;
    figures.others.push_back({static_cast<pid_t>(holder.pid), holder.num_bytes});
  }
  return figures;
}

}  // namespace sim
