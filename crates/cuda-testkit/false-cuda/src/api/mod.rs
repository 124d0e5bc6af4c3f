//! Owns the exported functions, one file for each family. Each is NVIDIA's function of that name (`cuda.h` 13.0): its arguments, its
//! order of checks as far as documents say, its codes. Handles are numbers here, which is the same to a caller on a 64-bit machine.

pub(crate) mod control;
pub(crate) mod copies;
pub(crate) mod device;
pub(crate) mod events;
pub(crate) mod graphs;
pub(crate) mod ipc;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod out;
pub(crate) mod procedures;
pub(crate) mod streams;

/// Makes exported functions: `fn name(needs, driver, arguments) { body }`, where the body answers `Answer`.
macro_rules! api {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($needs:ident, $driver:ident $(, $argument:ident: $type:ty)* $(,)?) $body:block
    )*) => { $(
        $(#[$attribute])*
        ///
        /// # Safety
        /// The arguments are what NVIDIA's function of this name may be given: pointers to as many bytes as it uses.
        // SAFETY: no other library that is loaded beside this one has these names.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
            $crate::driver::call(stringify!($name), $crate::driver::Needs::$needs, |$driver| $body)
        }
    )* };
}
pub(crate) use api;
