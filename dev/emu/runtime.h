/* runtime.h -- what the emulator's own files share: the runtime's state, its streams and events, its lock.
 *
 * Host threads change the state under `lock`. The device thread holds it while it chooses and while it takes
 * a finished operation off a stream, not while it runs one; nobody else takes operations off.
 */
#ifndef EMU_RUNTIME_H
#define EMU_RUNTIME_H
#include "dev/emu/check.h"
#include "dev/emu/stream.h"
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu {
// ---- waiting ----------------------------------------------------------------------------------------------
// Futexes, so that the checker, which may look at what programs do with mutexes, sees no order in them.
// sleeps while *word is `value`, at most `us` microseconds if that is not negative
void futex_wait(std::atomic<int>* word, int value, long us);
void futex_wake(std::atomic<int>* word);

class Lock {
  public:
    void lock();
    void unlock();

  private:
    std::atomic<int> word{0}; // 0 free, 1 held, 2 held and waited for
};
class Guard {
  public:
    explicit Guard(Lock& l) : lock(l) { lock.lock(); }
    ~Guard() { lock.unlock(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

  private:
    Lock& lock;
};
double now_ms();

// ---- streams and events -----------------------------------------------------------------------------------
struct Capture;

// one recording of an event. The device thread writes `ms`, then `done`
struct Record {
    std::atomic<bool> done{false};
    double ms = 0.0;
    CUstream_st* stream = nullptr; // that it stands on, as operation number `place`
    unsigned long place = 0;
    ~Record() { forget(this); }
};

// the thread that runs the host functions of a stream
struct Helper;

// a host thread that waits until `stream` has done `target` operations
struct Wait {
    CUstream_st* stream;
    unsigned long target;
    std::atomic<int> done{0};
};
} // namespace emu

struct CUstream_st {
    int device = 0, priority = 0;
    std::string name;
    int context = 0; // the checker's; 0: not yet opened
    emu::Op* first = nullptr;
    emu::Op* last = nullptr;
    unsigned long npushed = 0, ndone = 0;
    bool started = false; // `first` is
    emu::Helper* helper = nullptr;
    emu::Capture* capture = nullptr; // that it takes part in
    std::vector<int> tail;           // the nodes of it that the stream's next node comes after
};

struct CUevent_st {
    int device = 0;
    bool timed = false;
    std::shared_ptr<emu::Record> record; // the last one
    bool captured = false;               // the last recording was in a capture:
    unsigned long capture_id = 0;
    std::vector<int> nodes;
};

namespace emu {
enum Schedule { EAGER, LAZY, RANDOM_ORDER };
enum { MAX_DEVICES = 64 };

struct Runtime {
    // from the environment
    Schedule schedule = EAGER;
    unsigned long long random = 0;
    double stall_ms = 0.0;
    int ndevices = 0;
    size_t memory_nbytes = 0; // of a device
    bool peers = true, driver = true;
    // under lock
    Lock lock;
    std::vector<CUstream_st*> streams;
    std::vector<Wait*> waits;
    std::vector<Capture*> captures;
    unsigned long turn = 0, ncaptures = 0;
    int nstreams = 0; // made so far, for their names
    bool device_thread = false, forked = false;
    bool peer[MAX_DEVICES][MAX_DEVICES] = {};
    // the device thread sleeps on `pushed`
    std::atomic<int> pushed{0}, dozing{0};
    std::atomic<unsigned long> nfinished{0}; // operations
    std::atomic<double> last_call{0.0};
};
Runtime& runtime();

/* enter -- each API function that touches streams, events or memory begins with it: starts what has to be
 * started, and dies in a host function, which must not call CUDA.
 */
Runtime& enter(const char* call);
// sets what cudaGetLastError returns to the calling thread
cudaError_t fail(cudaError_t e);
int current_device();
// dies on the legacy stream
void require_stream(const char* call, cudaStream_t s);

// under lock
void push(CUstream_st* s, Op* op);
std::shared_ptr<Record> push_record(CUstream_st* s);
void push_wait(CUstream_st* s, const std::shared_ptr<Record>& record);
// not under lock: waits until the stream has done that many operations, without the checker's seeing an order
void wait_for(CUstream_st* s, unsigned long target);
// for all that is queued on the device now; the checker sees an order if `ordered`
void wait_for_device(int device, bool ordered);
CUstream_st* create_stream(int device, int priority, const std::string& name);
void destroy_stream(CUstream_st* s);

// ---- memory.cpp -------------------------------------------------------------------------------------------
enum { PAGEABLE = -2, PINNED = -1 };
// which device's memory it is, or PINNED or PAGEABLE; -3 if the bytes run over the end of an allocation
enum { OVERRUN = -3 };
int find_memory(const void* p, size_t nbytes);

// ---- graph.cpp --------------------------------------------------------------------------------------------
// an API call that a capture of this thread does not allow: ends the capture as failed
cudaError_t refuse_in_capture();
// under lock: the same for one that a capture of the stream does not allow
cudaError_t refuse_in_capture_of(CUstream_st* s);
cudaError_t capture_op(CUstream_st* s, Op* op);                           // under lock, s is capturing
cudaError_t capture_record(CUevent_st* e, CUstream_st* s, bool external); // likewise
cudaError_t capture_wait(CUstream_st* s, CUevent_st* e, bool external); // s or e's recording is in a capture

// ---- launch.cpp -------------------------------------------------------------------------------------------
const char* kernel_name(const void* kernel);
} // namespace emu
#endif
