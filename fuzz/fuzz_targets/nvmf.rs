#![no_main]

forebay_fuzz::targets! {
    "nvmf_auth" => forebay_nvmf::fuzz::auth,
    "nvmf_capsules" => forebay_nvmf::fuzz::capsules,
    "nvmf_keys" => forebay_nvmf::fuzz::keys,
    "nvmf_pdus" => forebay_nvmf::fuzz::pdus,
}
