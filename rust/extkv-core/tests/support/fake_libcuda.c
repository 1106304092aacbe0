/* A CUDA driver made of bookkeeping, for machines without one. Built by the driver's tests with
 * flags that choose what is wrong with it:
 *   VERSION, INIT_CODE, NUM_DEVICES, HAS_VMM, HAS_POSIX_FD, HAS_RDMA: what the driver reports
 *   POSIX_FD_FAILS, RDMA_FAILS, ACCESS_FAILS: calls that fail although the device reports support
 *   FOREIGN_CONTEXT: a context that is not primary is current when the process starts
 *   WITHOUT_MEMSET: a function is missing
 * It holds to the rules read off a real driver: whole handles only, nothing mapped twice. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef VERSION
#define VERSION 13000
#endif
#ifndef INIT_CODE
#define INIT_CODE 0
#endif
#ifndef NUM_DEVICES
#define NUM_DEVICES 2
#endif
#ifndef HAS_VMM
#define HAS_VMM 1
#endif
#ifndef HAS_POSIX_FD
#define HAS_POSIX_FD 1
#endif
#ifndef HAS_RDMA
#define HAS_RDMA 1
#endif

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_DEVICE = 101,
       NOT_SUPPORTED = 801 };
enum { GRANULE = 2 << 20, MAX = 4096 };
static const uint64_t TOTAL = 64u << 20;
static const uint64_t PRIMARY = 0x1000, FOREIGN = 0x9999;

typedef struct { int type; int handle_types; int location_type; int location_id; void *metadata;
                 unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4];
} Properties;
typedef struct { int location_type; int location_id; int flags; } Access;

static uint64_t used[NUM_DEVICES + 1], next_address = 1ull << 40, next_handle = 1, next_stream = 64;
static struct { uint64_t base, length; } reservations[MAX];
static struct { uint64_t id, length; int device, maps, released; } handles[MAX];
static struct { uint64_t address, length, handle; int accessible; } mappings[MAX];
static struct { uint64_t id, context; } streams[MAX];
static _Thread_local uint64_t stack[64];
static _Thread_local int depth;
static _Thread_local unsigned capture_mode;
#ifdef FOREIGN_CONTEXT
static _Thread_local int started;
static void start_thread(void) { if (!started) { started = 1; stack[depth++] = FOREIGN; } }
#else
static void start_thread(void) {}
#endif

static int current_device(void) {
    start_thread();
    if (depth == 0) return -1;
    return stack[depth - 1] == FOREIGN ? 0 : (int)(stack[depth - 1] - PRIMARY);
}

int cuInit(unsigned flags) { (void)flags; return INIT_CODE; }
int cuDriverGetVersion(int *version) { *version = VERSION; return OK; }
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
    return code == 12345 ? INVALID_VALUE : OK;
}
int cuDeviceGetCount(int *count) { *count = NUM_DEVICES; return OK; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= NUM_DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "Fake H200", (size_t)length);
    return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 102 ? HAS_VMM : attribute == 103 ? HAS_POSIX_FD
           : attribute == 110 ? HAS_RDMA : 0;
    return OK;
}
int cuDevicePrimaryCtxRetain(uint64_t *context, int device) { *context = PRIMARY + device; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxPushCurrent_v2(uint64_t context) { start_thread(); stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(uint64_t *context) {
    if (depth == 0) return INVALID_CONTEXT;
    *context = stack[--depth];
    return OK;
}
int cuCtxGetCurrent(uint64_t *context) {
    start_thread();
    *context = depth ? stack[depth - 1] : 0;
    return OK;
}
int cuCtxGetDevice(int *device) {
    *device = current_device();
    return *device < 0 ? INVALID_CONTEXT : OK;
}
int cuCtxSynchronize(void) { return current_device() < 0 ? INVALID_CONTEXT : OK; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
int cuStreamCreateWithPriority(uint64_t *stream, unsigned flags, int priority) {
    if (depth == 0 || flags != 1 || priority != -5) return INVALID_VALUE;
    *stream = next_stream++;
    streams[*stream % MAX].id = *stream;
    streams[*stream % MAX].context = stack[depth - 1];
    return OK;
}
int cuStreamDestroy_v2(uint64_t stream) { (void)stream; return OK; }
int cuStreamGetCtx(uint64_t stream, uint64_t *context) {
    *context = streams[stream % MAX].id == stream ? streams[stream % MAX].context : FOREIGN;
    return OK;
}
int cuStreamSynchronize(uint64_t stream) { (void)stream; return OK; }
int cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    unsigned previous = capture_mode;
    capture_mode = *mode;
    *mode = previous;
    return OK;
}

int cuMemAddressReserve(uint64_t *address, size_t length, size_t alignment, uint64_t hint, uint64_t f) {
    (void)alignment; (void)hint; (void)f;
    if (length == 0 || length % GRANULE) return INVALID_VALUE;
    if (length > (1ull << 46)) return OUT_OF_MEMORY;
    for (int i = 0; i < MAX; i++) if (!reservations[i].length) {
        reservations[i].base = *address = next_address;
        reservations[i].length = length;
        next_address += length + GRANULE;
        return OK;
    }
    return OUT_OF_MEMORY;
}
int cuMemAddressFree(uint64_t address, size_t length) {
    for (int i = 0; i < MAX; i++)
        if (mappings[i].length && mappings[i].address >= address
            && mappings[i].address < address + length) return INVALID_VALUE;
    for (int i = 0; i < MAX; i++)
        if (reservations[i].length == length && reservations[i].base == address) {
            reservations[i].length = 0;
            return OK;
        }
    return INVALID_VALUE;
}
int cuMemCreate(uint64_t *handle, size_t length, const Properties *properties, uint64_t flags) {
    int device = properties->location_id;
    if (flags || !length || length % GRANULE || device != current_device()) return INVALID_VALUE;
#ifdef POSIX_FD_FAILS
    if (properties->handle_types == 1) return NOT_SUPPORTED;
#endif
#ifdef RDMA_FAILS
    if (properties->rdma) return NOT_SUPPORTED;
#endif
    if (used[device] + length > TOTAL) return OUT_OF_MEMORY;
    for (int i = 0; i < MAX; i++) if (!handles[i].id) {
        handles[i].id = *handle = next_handle++;
        handles[i].length = length;
        handles[i].device = device;
        handles[i].maps = handles[i].released = 0;
        used[device] += length;
        return OK;
    }
    return OUT_OF_MEMORY;
}
static int find_handle(uint64_t handle) {
    for (int i = 0; i < MAX; i++) if (handle && handles[i].id == handle) return i;
    return -1;
}
static void end_if_dead(int i) {
    if (handles[i].released && !handles[i].maps) {
        used[handles[i].device] -= handles[i].length;
        handles[i].id = 0;
    }
}
int cuMemRelease(uint64_t handle) {
    int i = find_handle(handle);
    if (i < 0 || handles[i].released) return INVALID_VALUE;
    handles[i].released = 1;
    end_if_dead(i);
    return OK;
}
int cuMemMap(uint64_t address, size_t length, size_t offset, uint64_t handle, uint64_t flags) {
    int h = find_handle(handle), slot = -1;
    if (h < 0 || flags || address % GRANULE) return INVALID_VALUE;
    if (offset || handles[h].length != length) return NOT_SUPPORTED;
    for (int i = 0; i < MAX; i++) {
        if (!mappings[i].length) { slot = i; continue; }
        if (mappings[i].address < address + length
            && address < mappings[i].address + mappings[i].length) return INVALID_VALUE;
    }
    if (slot < 0) return OUT_OF_MEMORY;
    mappings[slot].address = address;
    mappings[slot].length = length;
    mappings[slot].handle = handle;
    mappings[slot].accessible = 0;
    handles[h].maps++;
    return OK;
}
static int covered(uint64_t address, uint64_t length) {
    uint64_t sum = 0;
    for (int i = 0; i < MAX; i++) {
        if (!mappings[i].length || mappings[i].address + mappings[i].length <= address
            || mappings[i].address >= address + length) continue;
        if (mappings[i].address < address
            || mappings[i].address + mappings[i].length > address + length) return 0;
        sum += mappings[i].length;
    }
    return sum == length;
}
int cuMemSetAccess(uint64_t address, size_t length, const Access *access, size_t count) {
#ifdef ACCESS_FAILS
    return INVALID_VALUE;
#endif
    if (count != 1 || access->flags != 3 || access->location_type != 1) return INVALID_VALUE;
    if (access->location_id != current_device() || !covered(address, length)) return INVALID_VALUE;
    for (int i = 0; i < MAX; i++)
        if (mappings[i].address >= address && mappings[i].address < address + length)
            mappings[i].accessible = 1;
    return OK;
}
int cuMemUnmap(uint64_t address, size_t length) {
    if (!covered(address, length)) return INVALID_VALUE;
    for (int i = 0; i < MAX; i++)
        if (mappings[i].length && mappings[i].address >= address
            && mappings[i].address < address + length) {
            int h = find_handle(mappings[i].handle);
            mappings[i].length = 0;
            handles[h].maps--;
            end_if_dead(h);
        }
    return OK;
}
int cuMemGetAllocationGranularity(size_t *granularity, const Properties *properties, unsigned option) {
    if (option || properties->type != 1 || properties->location_type != 1) return INVALID_VALUE;
    *granularity = GRANULE;
    return OK;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (current_device() < 0) return INVALID_CONTEXT;
    *free_bytes = TOTAL - used[current_device()];
    *total = TOTAL;
    return OK;
}
#ifndef WITHOUT_MEMSET
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t length, uint64_t stream) {
    (void)value;
    if (streams[stream % MAX].id != stream || capture_mode != 2) return INVALID_VALUE;
    uint64_t next = address;
    while (next < address + length) {
        int found = 0;
        for (int i = 0; i < MAX && !found; i++)
            if (mappings[i].length && mappings[i].accessible && mappings[i].address <= next
                && next < mappings[i].address + mappings[i].length) {
                next = mappings[i].address + mappings[i].length;
                found = 1;
            }
        if (!found) return INVALID_VALUE;
    }
    return OK;
}
#endif
