//! Processor time.

/// Returns the processor time of this process in seconds, all threads together.
pub fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc/self/stat");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    // Fields 14 and 15 (utime, stime), in ticks of 10 ms.
    fields[11..13].iter().map(|field| field.parse::<f64>().expect("ticks") / 100.0).sum()
}
