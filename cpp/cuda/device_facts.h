// Properties of each GPU that the planner uses.
#pragma once

#include "preflash/device_services.h"

namespace preflash {

// 0 without a driver or a GPU; never an error.
int device_count();

// Facts of one device, read once per process. A refusal leaves *facts as it was.
LaunchError query_device(int device, DeviceFacts* facts);

}  // namespace preflash
