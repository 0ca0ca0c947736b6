/* The part of CANN's runtime that torch_npu asks for answers: one device whose memory is the host's, where copies and
 * fills work and every other operator only leaves its name in a log. The generator adds the rest as functions that
 * return 0. */
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0
#define FAILURE 1

/* The names of the operators launched since the last clear, each followed by a comma. */
static char launched[1 << 16];

void fake_launched_add(const char *name) {
    if (strlen(launched) + strlen(name) + 2 < sizeof launched) {
        strcat(launched, name);
        strcat(launched, ",");
    }
}
const char *fake_launched(void) { return launched; }
void fake_launched_clear(void) { launched[0] = 0; }

int aclopCompileAndExecute(const char *name) {
    fake_launched_add(name);
    return SUCCESS;
}
unsigned long aclGetCompileoptSize(int option) { return 256; }
int aclGetCompileopt(int option, char *value, unsigned long size) {
    memset(value, 0, size);
    strcpy(value, "disable");
    return SUCCESS;
}

/* Device */
int aclrtGetDeviceCount(unsigned *count) {
    *count = 1;
    return SUCCESS;
}
int aclrtGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}
int aclrtGetCurrentContext(void **context) {
    *context = (void *)0x3000;
    return SUCCESS;
}
int aclrtDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return SUCCESS;
}
const char *aclrtGetSocName(void) { return "Ascend910B2"; }
const char *aclGetRecentErrMsg(void) { return "fake"; }

/* Memory */
static int allocate(void **pointer, unsigned long size) {
    *pointer = aligned_alloc(512, (size + 1023) / 512 * 512);
    return *pointer ? SUCCESS : FAILURE;
}
int aclrtMalloc(void **pointer, unsigned long size, int policy) { return allocate(pointer, size); }
int aclrtMallocAlign32(void **pointer, unsigned long size, int policy) { return allocate(pointer, size); }
int aclrtMallocHost(void **pointer, unsigned long size) { return allocate(pointer, size); }
int aclrtFree(void *pointer) {
    free(pointer);
    return SUCCESS;
}
int aclrtFreeHost(void *pointer) { return aclrtFree(pointer); }
int aclrtGetMemInfo(int kind, unsigned long *available, unsigned long *total) {
    *available = 8ul << 30;
    *total = 16ul << 30;
    return SUCCESS;
}
int aclrtPointerGetAttributes(const void *pointer, void *attributes) { return FAILURE; }
int aclrtMemcpy(void *to, unsigned long room, const void *from, unsigned long size, int kind) {
    memcpy(to, from, size);
    return SUCCESS;
}
int aclrtMemcpyAsync(void *to, unsigned long room, const void *from, unsigned long size, int kind, void *stream) {
    return aclrtMemcpy(to, room, from, size, kind);
}
int aclrtMemset(void *to, unsigned long room, int value, unsigned long size) {
    memset(to, value, size);
    return SUCCESS;
}
int aclrtMemsetAsync(void *to, unsigned long room, int value, unsigned long size, void *stream) {
    return aclrtMemset(to, room, value, size);
}

/* Streams and events: numbers that differ, all of them done. */
static long last_stream = 0x1000;
int aclrtCreateStream(void **stream) {
    *stream = (void *)(last_stream += 16);
    return SUCCESS;
}
int aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flags) { return aclrtCreateStream(stream); }
int aclrtCreateEventWithFlag(void **event, unsigned flags) {
    *event = (void *)0x2000;
    return SUCCESS;
}
int aclrtCreateEventExWithFlag(void **event, unsigned flags) { return aclrtCreateEventWithFlag(event, flags); }
int aclrtQueryEventStatus(void *event, int *status) {
    *status = 1;
    return SUCCESS;
}
