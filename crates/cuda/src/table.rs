//! Tables of functions of one library, and the dlopen behind them. Nothing here calls a function of a library.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Opens a library with all its functions bound, so that a call can never end in an unresolved name.
///
/// # Errors
/// What the dynamic linker says.
pub(crate) fn open(path: &str) -> Result<Library, String> {
    // SAFETY: NVIDIA's libraries, and their doubles, initialise themselves when they are loaded and need nothing before that.
    // The caller closes no library whose functions were called.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // The error itself only names the call.
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
    })
}

/// The address of a function.
pub(crate) fn address(library: &Library, name: &str) -> Option<usize> {
    // SAFETY: the address is only compared, never called.
    let found = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
    found.ok().map(|symbol| *symbol as usize)
}

/// # Safety
/// `F` is the type of that function in the library.
///
/// # Errors
/// The name, if the library does not have it.
pub(crate) unsafe fn function<F: Copy>(library: &Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| name)
}

/// Declares a struct of functions, each with its name in the library. `resolve` finds all or names the first that is missing.
macro_rules! function_table {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal: fn($($arg:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl $name {
            /// # Errors
            /// The name of the first function that is missing.
            pub(crate) fn resolve(library: &libloading::os::unix::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $(
                        // SAFETY: the signature is the one of the library's C header.
                        $field: unsafe { $crate::table::function(library, $symbol) }?,
                    )*
                })
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}

pub(crate) use function_table;

/// The file that a loaded function comes from, which tells where the dynamic linker found a library. `None` if the system does
/// not say.
pub(crate) fn file_of(address: usize) -> Option<String> {
    file_in_maps(&std::fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// Lines of `/proc/PID/maps`: `START-END PERMISSIONS OFFSET DEVICE INODE PATH` (proc_pid_maps(5)).
fn file_in_maps(maps: &str, address: usize) -> Option<String> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let path = rest.find('/').map(|at| rest[at..].to_owned());
        (start..end).contains(&address).then_some(path).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address_is_found_in_the_maps_of_a_process() {
        let maps = "7f00-7f10 r--p 00000000 08:01 12 /usr/lib/liba.so.1\n\
                    7f10-7f20 r-xp 00001000 08:01 12 /usr/lib/with space/libb.so\n\
                    7f20-7f30 rw-p 00000000 00:00 0 \n";
        assert_eq!(file_in_maps(maps, 0x7f0f).as_deref(), Some("/usr/lib/liba.so.1"));
        assert_eq!(
            file_in_maps(maps, 0x7f10).as_deref(),
            Some("/usr/lib/with space/libb.so")
        );
        assert_eq!(file_in_maps(maps, 0x7f20), None);
        assert_eq!(file_in_maps(maps, 0x8000), None);
    }

    #[test]
    fn a_library_that_is_not_there_is_an_answer() {
        assert!(open("libbaton-has-no-such-library.so.1").is_err());
    }
}
