//! Owns the result codes that the double answers, with their names. The values are those of `cuda.h` 13.0.

use std::ffi::CStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

pub(crate) type Answer = Result<(), Code>;

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        impl Code {
            $(pub const $name: Code = Code($value);)*

            /// The name and what it says. `None`: no code that the double knows.
            pub(crate) fn words(self) -> Option<(&'static CStr, &'static CStr)> {
                match self.0 {
                    0 => Some((c"CUDA_SUCCESS", c"no error")),
                    $($value => {
                        let name = concat!("CUDA_ERROR_", stringify!($name), "\0");
                        let text = concat!($text, "\0");
                        let words = |text: &'static str| CStr::from_bytes_with_nul(text.as_bytes()).ok();
                        Some((words(name)?, words(text)?))
                    })*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "an argument is out of its range";
    OUT_OF_MEMORY = 2, "the device has too little memory left";
    NOT_INITIALIZED = 3, "cuInit was not called";
    NO_DEVICE = 100, "there is no device";
    INVALID_DEVICE = 101, "there is no device of this number";
    INVALID_IMAGE = 200, "the image is no module";
    INVALID_CONTEXT = 201, "no context, or not this one, is current for the thread";
    MAP_FAILED = 205, "the memory could not be mapped";
    NO_BINARY_FOR_GPU = 209, "the image has no code for this device";
    INVALID_PTX = 218, "the PTX could not be compiled";
    UNSUPPORTED_PTX_VERSION = 222, "the PTX is newer than the driver";
    INVALID_HANDLE = 400, "there is no such handle";
    ILLEGAL_STATE = 401, "the object is not in the state that the call needs";
    NOT_FOUND = 500, "there is nothing of this name";
    NOT_READY = 600, "the work is not done yet";
    ILLEGAL_ADDRESS = 700, "a kernel or a copy used memory that is not allocated";
    LAUNCH_OUT_OF_RESOURCES = 701, "the launch needs more than the kernel or the device allows";
    LAUNCH_TIMEOUT = 702, "a kernel did not end";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "the host memory is registered";
    HOST_MEMORY_NOT_REGISTERED = 713, "the host memory is not registered";
    ILLEGAL_INSTRUCTION = 715, "a kernel executed an illegal instruction";
    MISALIGNED_ADDRESS = 716, "a kernel used a misaligned address";
    LAUNCH_FAILED = 719, "a kernel failed";
    NOT_PERMITTED = 800, "the call is not permitted here";
    NOT_SUPPORTED = 801, "the call is not supported";
    SYSTEM_NOT_READY = 802, "the driver cannot start";
    STREAM_CAPTURE_UNSUPPORTED = 900, "the call is not permitted while a stream is captured";
    STREAM_CAPTURE_INVALIDATED = 901, "an earlier call has made the capture invalid";
    STREAM_CAPTURE_MERGE = 902, "two captures would be merged";
    STREAM_CAPTURE_UNMATCHED = 903, "the capture was begun on another stream";
    STREAM_CAPTURE_UNJOINED = 904, "a stream of the capture was not joined to the first one";
    STREAM_CAPTURE_ISOLATION = 905, "captured work would depend on work outside the capture";
    STREAM_CAPTURE_IMPLICIT = 906, "the legacy stream would depend on a captured stream";
    CAPTURED_EVENT = 907, "the event was last recorded in a capture";
    STREAM_CAPTURE_WRONG_THREAD = 908, "the capture was begun by another thread";
    UNKNOWN = 999, "the double failed";
}

impl Code {
    /// After such an error every call on the context answers it.
    pub(crate) fn is_sticky(self) -> bool {
        matches!(self.0, 700 | 702 | 710 | 714..=719)
    }
}
