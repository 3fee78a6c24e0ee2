//! Fuzz targets of one crate in one program.

#[doc(hidden)]
pub use libfuzzer_sys;

/// Environment variable that names the target to run.
pub const VARIABLE: &str = "FUZZ_TARGET";

/// Function that a fuzzer calls with each input.
pub type Target = fn(&[u8]);

/// Returns the target that [`VARIABLE`] names.
///
/// # Panics
/// When it names none of `targets`.
pub fn chosen(targets: &[(&str, Target)]) -> Target {
    let name = std::env::var(VARIABLE).unwrap_or_default();
    let found = targets.iter().find(|(known, _)| *known == name);
    let known: Vec<&str> = targets.iter().map(|(known, _)| *known).collect();
    found.unwrap_or_else(|| panic!("{VARIABLE}={name}: set it to one of {}", known.join(", "))).1
}

/// Defines a program with the given targets.
#[macro_export]
macro_rules! targets {
    ($($name:literal => $run:path),+ $(,)?) => {
        static CHOSEN: std::sync::OnceLock<$crate::Target> = std::sync::OnceLock::new();

        $crate::libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            let run = CHOSEN.get_or_init(|| $crate::chosen(&[$(($name, $run)),+]));
            run(data);
        });
    };
}
