/* What was asked of the device: totals, names, and a hook that is called at each wait. Read by device.py. */
#include "null_gpu.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define NAMES 65536
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long totals[COUNTS];
static struct {
    const char *name;
    enum Count kind;
    long number;
} names[NAMES];
static void (*hook)(const char *name);

void count(enum Count kind, const char *name) {
    pthread_mutex_lock(&lock);
    totals[kind]++;
    size_t slot = ((size_t)name >> 3) * 2654435761u % NAMES;
    for (int tried = 0; tried < NAMES; tried++, slot = (slot + 1) % NAMES)
        if (!names[slot].name || (names[slot].name == name && names[slot].kind == kind)) {
            names[slot].name = name, names[slot].kind = kind, names[slot].number++;
            break;
        }
    void (*told)(const char *) = kind == WAITS ? hook : NULL;
    pthread_mutex_unlock(&lock);
    if (told) told(name);
}

long null_gpu_total(int kind) { return totals[kind]; }

void null_gpu_on_wait(void (*function)(const char *)) { hook = function; }

/* Calls `each` with kind, name and number of all that was counted. */
void null_gpu_each(void (*each)(int, const char *, long)) {
    for (size_t slot = 0; slot < NAMES; slot++)
        if (names[slot].number) each(names[slot].kind, names[slot].name, names[slot].number);
}
